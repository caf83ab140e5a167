"""DeepSpeed's call sequence over orlop.AdamW, for one rank:

    from orlop import deepspeed_compat as deepspeed

    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, config="ds_config.json")
    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

`orlop config explain FILE` tells what every key of the configuration becomes. No module named deepspeed is
installed, so that tools which look for it do not take Orlop for it.
"""

from __future__ import annotations

from ..torch_support import require_torch

torch = require_torch("orlop.deepspeed_compat")

from .. import errors  # noqa: E402
from ..deepspeed_config import DeepSpeedConfig  # noqa: E402
from . import ops, utils, zero  # noqa: E402
from .engine import DeepSpeedEngine, make_engine  # noqa: E402

__all__ = [
    "DeepSpeedConfig",
    "DeepSpeedEngine",
    "add_config_arguments",
    "init_distributed",
    "initialize",
    "ops",
    "utils",
    "zero",
]


def initialize(
    args=None,
    model=None,
    optimizer=None,
    model_parameters=None,
    training_data=None,
    lr_scheduler=None,
    distributed_port=None,
    mpu=None,
    dist_init_required=None,
    collate_fn=None,
    config=None,
    mesh_param=None,
    config_params=None,
):
    """(engine, optimizer, data loader or None, scheduler or None).

    optimizer: a torch AdamW or Adam (its groups and state are taken over), one of Orlop, or a callable that
    makes one from parameters; else the configuration's. lr_scheduler: a scheduler or a callable of the
    optimizer; else the configuration's. training_data: a dataset, which the loader shuffles anew each pass unless
    it is iterable.
    """
    if model is None:
        raise errors.UsageError("deepspeed_compat.initialize: model is missing")
    for name, value in (("mpu", mpu), ("mesh_param", mesh_param)):
        if value is not None:
            raise errors.UsageError(
                f"deepspeed_compat.initialize: {name} is refused: weights are not partitioned"
            )
    if config is None:
        config = config_params if config_params is not None else getattr(args, "deepspeed_config", None)
    if config is None:
        raise errors.UsageError(
            "deepspeed_compat.initialize: config is missing; give config=FILE_OR_DICT or --deepspeed_config FILE"
        )
    init_distributed()
    engine = make_engine(model, DeepSpeedConfig.read(config), optimizer, model_parameters, lr_scheduler)
    engine.collate_fn = collate_fn
    loader = engine.deepspeed_io(training_data) if training_data is not None else None
    return engine, engine.optimizer, loader, engine.lr_scheduler


def init_distributed(*_, **__):
    """Nothing to do on one rank; more are refused."""
    import os

    size = int(os.environ.get("WORLD_SIZE", os.environ.get("OMPI_COMM_WORLD_SIZE", "1")))
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        size = torch.distributed.get_world_size()
    if size > 1:
        raise errors.UsageError(
            f"deepspeed_compat runs on one rank, the launcher started {size}: start one process"
        )


def add_config_arguments(parser):
    """--deepspeed and --deepspeed_config FILE."""
    group = parser.add_argument_group("DeepSpeed", "as orlop.deepspeed_compat reads it")
    group.add_argument("--deepspeed", action="store_true", help="accepted; initialize() decides")
    group.add_argument("--deepspeed_config", metavar="FILE", help="configuration in DeepSpeed's JSON")
    return parser

"""The optimizer of an engine: orlop.AdamW, with the options that a DeepSpeed configuration means."""

from __future__ import annotations

import torch

from .. import _orlop, errors, wrapping
from ..adamw import AdamW
from ..deepspeed_config import DeepSpeedConfig
from .ops.adam import DeepSpeedCPUAdam

_ZERO = "zero_optimization"


def _optimizer_options(config: DeepSpeedConfig, model: torch.nn.Module) -> dict:
    """Of orlop.AdamW, from the configuration. Gradients leave, so that micro-batches are summed in fp32 and
    loss scale and clipping are one multiplication in fp32."""
    low = config["data_types.grad_accum_dtype"] in ("bf16", "fp16") and not config["fp16.enabled"]
    hidden = config[f"{_ZERO}.overlap_comm"]
    if hidden is None:
        hidden = config[f"{_ZERO}.stage"] == 3
    checked = config["fp16.enabled"] or config["bf16.check_grad_overflow"]
    options = {
        "gradients": "stay" if low else "leave",
        "nonfinite": "skip" if checked else "apply",
        "moments": "bf16" if config["bf16.bf16_optimizer_states"] else "fp32",
        "module": model if hidden else None,
        "states": "auto" if config[f"{_ZERO}.offload_optimizer.device"] == "none" else "host",
        "nvme": _drives(config, "offload_optimizer"),
    }
    share = f"{_ZERO}.offload_optimizer.cpuadam_cores_perc"
    if any(finding.path == share for finding in config.findings):
        options["threads"] = max(1, round(config[share] * _orlop.default_threads()))
    return options


def _drives(config: DeepSpeedConfig, section: str) -> dict | None:
    """The drives of offload_optimizer or offload_param; block and depth are this project's own where the file gives
    none."""
    if config[f"{_ZERO}.{section}.device"] != "nvme":
        return None
    given = {finding.path for finding in config.findings}
    keys = {"block": "aio.block_size", "queue_depth": "aio.queue_depth"}
    return {
        "paths": config[f"{_ZERO}.{section}.nvme_path"],
        **{key: config[path] for key, path in keys.items() if path in given},
    }


def make_optimizer(config, model, optimizer, parameters):
    if parameters is None:
        parameters = [p for p in model.parameters() if p.requires_grad]
    options = _optimizer_options(config, model)
    if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(parameters)
    if isinstance(optimizer, AdamW):
        if options["nvme"] is not None and optimizer._drives is None:
            raise errors.UsageError(
                f'{config.source}: {_ZERO}.offload_optimizer.device is "nvme", but the optimizer that was given keeps '
                "its states in host memory; make it with nvme=[...], or let the configuration make it"
            )
        optimizer._gradients = options["gradients"]
        optimizer._follow_moves()
        return optimizer
    if optimizer is not None:
        return AdamW.from_torch(optimizer, **options)
    if config["optimizer.type"] is None:
        return None
    return DeepSpeedCPUAdam(parameters, **_hyperparameters(config), adamw_mode=_is_adamw(config), **options)


def _hyperparameters(config):
    return {name: config[f"optimizer.params.{name}"] for name in ("lr", "betas", "eps", "weight_decay")}


def _is_adamw(config):
    return config["optimizer.type"].lower() == "adamw" or config["optimizer.params.adam_w_mode"]


def stream_weights(config, model, optimizer, parameters):
    """offload_param: the weights of blocks come and go; the optimizer is made over them, or None."""
    options = _optimizer_options(config, model)
    options.pop("gradients")
    options["module"] = model
    parameters = [p for p in model.parameters() if p.requires_grad] if parameters is None else parameters
    if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(parameters)
    if optimizer is None and config["optimizer.type"] is not None:
        kind = torch.optim.AdamW if _is_adamw(config) else torch.optim.Adam
        optimizer = kind(parameters, **_hyperparameters(config))
    device = "cuda" if torch.cuda.is_available() else None
    drives = _drives(config, "offload_param")
    where = "auto" if drives is None else {"nvme": {**drives, "param_share": 1.0}}
    return wrapping.wrap(model, optimizer, where, device=device, **options)[1]

"""deepspeed.zero on one rank, where every parameter is whole."""

from __future__ import annotations

import contextlib

import torch

from ..adamw import live_optimizers
from ..deepspeed_config import DeepSpeedConfig
from ..model_init import building
from ..wrapping import gathered


class Init(contextlib.AbstractContextManager):
    """Builds modules in the configured 16-bit dtype, so that fp32 weights never exist; in host memory (orlop.init)
    where weights are to be offloaded."""

    def __init__(self, module=None, data_parallel_group=None, mem_efficient_linear=True, remote_device=None,
                 pin_memory=False, config_dict_or_path=None, config=None, enabled=True, dtype=None, mpu=None, **_):  # fmt: skip
        source = config_dict_or_path if config_dict_or_path is not None else config
        read = DeepSpeedConfig.read(source) if source is not None else None
        if dtype is None and read is not None:
            dtype = (
                torch.bfloat16 if read["bf16.enabled"] else torch.float16 if read["fp16.enabled"] else None
            )
        streams = read is not None and read["zero_optimization.offload_param.device"] in ("cpu", "nvme")
        self.dtype, self.enabled = dtype, enabled
        self.device = "cpu" if remote_device == "cpu" or streams else None
        if module is not None and enabled and dtype is not None:
            module.to(dtype)

    def __enter__(self):
        self._stack = contextlib.ExitStack()
        if self.enabled:
            self._stack.enter_context(building(self.dtype, self.device))
        return self

    def __exit__(self, *raised):
        return self._stack.__exit__(*raised)


class GatheredParameters(contextlib.AbstractContextManager):
    """Complete parameters to read and, with modifier_rank, to write: updates under way end first, and weights in
    host memory are brought."""

    def __init__(self, params, modifier_rank=None, fwd_module=None, enabled=True):
        self.params = [params] if isinstance(params, torch.Tensor) else list(params)
        self.write, self.enabled = modifier_rank is not None, enabled

    def __enter__(self):
        self._stack = contextlib.ExitStack()
        if self.enabled:
            for optimizer in live_optimizers():
                optimizer.synchronize()
            self._stack.enter_context(gathered(self.params, write=self.write))
        return self

    def __exit__(self, *raised):
        return self._stack.__exit__(*raised)


def register_external_parameter(module, parameter):
    """Nothing to do: every parameter is whole wherever it is used."""


@contextlib.contextmanager
def unwrap_model_for_generation(model):
    """The plain module, complete."""
    plain = getattr(model, "module", model)
    with torch.no_grad(), GatheredParameters(plain.parameters()):
        yield plain

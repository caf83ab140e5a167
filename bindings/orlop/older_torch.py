"""What newer versions of PyTorch do by themselves, for those from torch_support.OLDEST_TORCH on that do not."""

from __future__ import annotations

from .torch_support import TORCH_VERSION, torch


def names_beside(group: dict) -> dict:
    """A parameter group as PyTorch takes it: before 2.6 named parameters are not known to it."""
    params = group["params"]
    if TORCH_VERSION >= (2, 6) or isinstance(params, torch.Tensor):
        return group
    params = list(params)
    if not params or not all(isinstance(named, tuple) for named in params):
        return {**group, "params": params}
    names, parameters = zip(*params, strict=True)
    return {**group, "params": list(parameters), "param_names": list(names)}


def compile_through_modules() -> None:
    """Before 2.5 the compiler looks at the weights of a block before the hooks around it have brought them, and ends
    the process; where it goes through modules, as it does from 2.5 on, they are there."""
    if TORCH_VERSION < (2, 5):
        import torch._dynamo.config

        torch._dynamo.config.inline_inbuilt_nn_modules = True

"""deepspeed.utils: fp32 masters, gradients and moments by parameter; on one rank local means full."""

from __future__ import annotations

import logging

import torch

from .. import errors
from ..adamw import live_optimizers

logger = logging.getLogger("orlop")


def _owner(param):
    for optimizer in live_optimizers():
        if param in optimizer._slots:
            return optimizer
    return None


def _required_owner(param):
    optimizer = _owner(param)
    if optimizer is None:
        raise errors.UsageError("no optimizer of Orlop has states of this parameter")
    return optimizer


def safe_get_full_fp32_param(param):
    """A copy of the fp32 master, or None for a parameter without one."""
    optimizer = _owner(param)
    return None if optimizer is None else optimizer.master(param)


def safe_get_full_grad(param):
    """A copy of the gradient in fp32, or None."""
    optimizer = _owner(param)
    gradient = None if optimizer is None else optimizer.gradient(param)
    return None if gradient is None else gradient.float()


def safe_get_full_optimizer_state(param, optim_state_key):
    """A copy of "exp_avg" or "exp_avg_sq" in fp32, or None before the first step."""
    optimizer = _owner(param)
    if optimizer is None:
        return None
    optimizer.synchronize()
    state = optimizer.state.get(param, {}).get(optim_state_key)
    return None if state is None else state.float().clone()


def safe_set_full_fp32_param(param, value):
    """The fp32 master becomes `value`, broadcast to the parameter's shape, and the weights that, rounded."""
    _required_owner(param).set_master(param, value)


@torch.no_grad()
def safe_set_full_grad(param, value):
    """`param.grad` becomes a copy of `value`, which has as many elements, in the weights' dtype."""
    param.grad = value.to(dtype=param.dtype, device=param.device).reshape(param.shape).clone()


@torch.no_grad()
def safe_set_full_optimizer_state(param, value, optim_state_key):
    """The moment, "exp_avg" or "exp_avg_sq", becomes `value`, rounded where moments are in bf16. Raises UsageError for a
    parameter without states."""
    optimizer = _required_owner(param)
    optimizer.synchronize()
    optimizer._show_state(param)[optim_state_key].copy_(value)


def safe_update_full_grad_vectorized(params, update_func):
    """Replaces every gradient by update_func(gradient, param)."""
    for param in params:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


safe_get_local_fp32_param = safe_get_full_fp32_param
safe_get_local_grad = safe_get_full_grad
safe_get_local_optimizer_state = safe_get_full_optimizer_state
safe_set_local_fp32_param = safe_set_full_fp32_param
safe_set_local_grad = safe_set_full_grad
safe_set_local_optimizer_state = safe_set_full_optimizer_state


def set_z3_leaf_modules(model, leaf_module_classes):
    """Modules need no hints; returns those that match, as DeepSpeed does."""
    names = {c if isinstance(c, str) else c.__name__ for c in leaf_module_classes}
    return [module for module in model.modules() if type(module).__name__ in names]


def see_memory_usage(message, force=False):
    """Logs the host memory of all optimizers, when `force` is set."""
    if force:
        host = sum(optimizer.host_bytes() for optimizer in live_optimizers())
        device = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        logger.warning("%s: device %.3f GiB, optimizer states in host memory %.3f GiB",
                       message, device / 2**30, host / 2**30)  # fmt: skip

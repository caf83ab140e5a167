"""DeepSpeed's warm-up schedules as torch schedulers: the learning rate of step s, counted from 0."""

from __future__ import annotations

import math

import torch

from .. import errors


def _warm_up(step: int, steps: int, kind: str) -> float:
    """From 0 to 1 over `steps` steps, along log(step + 1) or a line."""
    if step >= steps:
        return 1.0
    return math.log(step + 1) / math.log(steps) if kind == "log" else step / steps


def make_scheduler(config, optimizer):
    """The configuration's scheduler. Raises UsageError for a list of rates that is not one per group."""
    name, params = config["scheduler.type"], config.scheduler_params()
    steps = max(2, params["warmup_num_steps"])
    kind = params["warmup_type"]
    total = params.get("total_num_steps")
    if "total_num_steps" in params and total is None:
        raise errors.UsageError(
            f"{config.source}: scheduler.params.total_num_steps is missing: {name} ends there"
        )
    groups = len(optimizer.param_groups)
    for key in ("warmup_min_lr", "warmup_max_lr"):
        if isinstance(params.get(key), list) and len(params[key]) != groups:
            raise errors.UsageError(
                f"{config.source}: scheduler.params.{key} has {len(params[key])} rates, the optimizer {groups} "
                "groups: give one rate, or one per group"
            )

    def of_group(key: str, index: int, base: float) -> float:
        value = params[key]
        return base if value is None else value[index] if isinstance(value, list) else value

    def rate(index: int, group: dict, step: int) -> float:
        base = group["initial_lr"]
        if name == "WarmupCosineLR":
            low = params["warmup_min_ratio"]
            if step < steps:
                return base * (low + (1.0 - low) * _warm_up(step, steps, kind))
            progress = min(1.0, (step - steps + 1) / max(1, total - steps))
            low = params["cos_min_ratio"]
            return base * max(0.0, low + (1.0 - low) * (1 + math.cos(math.pi * progress)) / 2)
        low, high = (of_group(key, index, base) for key in ("warmup_min_lr", "warmup_max_lr"))
        if name == "WarmupDecayLR" and step >= steps:
            return low + (high - low) * max(0.0, (total - step) / max(1.0, total - steps))
        return low + (high - low) * _warm_up(step, steps, kind)

    return _Schedule(optimizer, rate)


class _Schedule(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer, rate):
        self._rate = rate
        super().__init__(optimizer)

    def get_lr(self):
        return [self._rate(i, group, self.last_epoch) for i, group in enumerate(self.optimizer.param_groups)]

    def state_dict(self):
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state):
        self.last_epoch = int(state["last_epoch"])
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = rate
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

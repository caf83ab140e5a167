"""What AdamW refuses: hyperparameters out of range, options it lacks, states that do not fit."""

from __future__ import annotations

import copy
import math

import torch

from . import errors
from .state_home import MASTER_KEY, MOMENT_KEYS

_REFUSED = {
    "amsgrad": "the maximum of exp_avg_sq is not kept",
    "capturable": "the update runs on the host, which no CUDA graph can hold",
    "differentiable": "the update writes the weights outside of autograd",
    "foreach": "every step already goes over all tensors in one call; leave it at None",
    "fused": "the update is one fused pass already; leave it at None",
}

_ROUNDINGS = 1e-12  # of a learning rate, all of a schedule


def check_choice(name, value, known):
    if value not in known:
        raise errors.UsageError(f"{name} = {value!r} is not known; use one of {', '.join(map(repr, known))}")


def check_bytes(name, value):
    """None, which leaves it to us, or a number of bytes."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (is_number and value >= 0):
        raise errors.UsageError(f"{name} = {value!r} is neither None nor a number of bytes")


def refuse_several_ranks():
    """For gradients that leave: those that DDP averages after them would not be used."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    if (ranks := distributed.get_world_size()) > 1:
        raise errors.UsageError(
            f'gradients="leave" takes gradients before {ranks} ranks have averaged them; use gradients="stay"'
        )


def check_hyperparameters(group, where, first_lr):
    """torch's ranges and exceptions; options that are not there are refused by name. A rate that a scheduler takes to
    zero may end below it, by roundings of what it began with: `first_lr`, where no scheduler tells."""
    for option, reason in _REFUSED.items():
        if group.get(option):
            raise errors.UsageError(f"{where}: {option}=True is not supported by orlop.AdamW: {reason}")
    beta1, beta2 = group["betas"]
    lr, least_lr = group["lr"], -_ROUNDINGS * group.get("initial_lr", first_lr)
    for name, value, fits in (
        ("learning rate", lr, lr >= least_lr and math.isfinite(lr)),
        ("epsilon value", group["eps"], group["eps"] >= 0 and math.isfinite(group["eps"])),
        ("beta parameter at index 0", beta1, 0 <= beta1 < 1),
        ("beta parameter at index 1", beta2, 0 <= beta2 < 1),
        ("weight_decay value", group["weight_decay"], 0 <= group["weight_decay"] < math.inf),
    ):
        if not fits:
            raise ValueError(f"{where}: Invalid {name}: {value}")


def check_known(module, known):
    """Refuses parameters that have come into `module` since `known` ({parameter: name}) was made of it, and have a
    gradient that nobody would apply. Below 1 us for each of them."""
    modules = [module]
    while modules:
        part = modules.pop()
        modules += [child for child in part._modules.values() if child is not None]
        for p in part._parameters.values():
            if p is not None and p not in known and p.requires_grad and p.grad is not None:
                new = [n for n, q in module.named_parameters() if q not in known and q.grad is not None]
                raise errors.UsageError(
                    f"{', '.join(new)}: in the module since the optimizer was made, with a gradient but in none of "
                    "its groups, so that it would never be trained; give it to add_param_group(), or make the "
                    "optimizer after the change"
                )


def check_names(present, saved):
    """Refuses, with the names, groups of other parameters or in another order, which positions alone would mix up.
    Names are there when an optimizer was given named_parameters()."""
    here, there = ([list(group.get("param_names") or ()) for group in groups] for groups in (present, saved))
    if here == there or not any(here) or not any(there):
        return
    known, stored = ([name for names in groups for name in names] for groups in (here, there))
    findings = {
        "missing": [name for name in known if name not in stored],
        "unexpected": [name for name in stored if name not in known],
    }
    listed = "; ".join(f"{what}: {', '.join(names)}" for what, names in findings.items() if names)
    raise ValueError(
        f"loaded state dict is of other parameters ({listed or 'in other groups or another order'}); "
        "register_load_state_dict_pre_hook() is where states are renamed or left out"
    )


def match_groups(present, state_dict, decoupled):
    """The saved groups over the present parameters; raises as torch does when they do not fit."""
    saved = state_dict["param_groups"]
    check_names(present, saved)
    if len(saved) != len(present):
        raise ValueError(
            f"loaded state dict has a different number of parameter groups: {len(saved)}, here are {len(present)}"
        )
    for i, (new, old) in enumerate(zip(saved, present, strict=True)):
        if len(new["params"]) != len(old["params"]):
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size of optimizer's group: "
                f"group {i} has {len(new['params'])} parameters, here are {len(old['params'])}"
            )
        if new.get("decoupled_weight_decay", decoupled) != decoupled:
            raise ValueError(
                f"group {i} was saved by {'Adam' if decoupled else 'AdamW'}, whose weight decay means something else"
            )
    merged = []
    for new, old in zip(saved, present, strict=True):
        group = copy.deepcopy({key: value for key, value in new.items() if key != "params"})
        # fused and foreach only choose how torch computes the same step.
        group.update({key: None for key in ("fused", "foreach") if key in group})
        for key, value in old.items():
            group.setdefault(key, value)
        group["params"] = old["params"]
        merged.append(group)
    return merged


def match_states(param_of_id, states, names):
    """Saved states by parameter; raises a ValueError that lists everything that does not fit."""
    wrong, matched = [], {}
    for key, state in states.items():
        if key not in param_of_id:
            wrong.append(f"state {key!r} belongs to no parameter")
            continue
        p = param_of_id[key]
        name = names[p]
        missing = [k for k in ("step", *MOMENT_KEYS) if k not in state]
        if missing:
            wrong.append(f"{name} lacks {', '.join(missing)}")
            continue
        if "max_exp_avg_sq" in state:
            wrong.append(f"{name} was trained with amsgrad=True, which orlop.AdamW does not support")
        for k in MOMENT_KEYS:
            if state[k].shape != p.shape:
                wrong.append(f"{k} of {name} has shape {list(state[k].shape)}, the parameter {list(p.shape)}")
        rest = MASTER_KEY.get(p.dtype)
        expected = torch.int16 if rest == "master_lo" else torch.float32
        if rest in state and (state[rest].dtype != expected or state[rest].shape != p.shape):
            state = {k: v for k, v in state.items() if k != rest}  # another optimizer rewrote it
        matched[p] = state
    if wrong:
        raise ValueError("loaded state dict does not fit: " + "; ".join(wrong))
    return matched

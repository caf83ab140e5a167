"""Writes lr_table.inc: the learning rates that torch's LambdaLR gives with the schedules of transformers.

Run it by hand when a schedule is added: python make_lr_table.py > lr_table.inc
"""

import torch
from transformers import optimization as hf

STEPS = 23


def rates(peak, make_schedule):
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=peak)
    schedule = make_schedule(optimizer)
    values = []
    for _ in range(STEPS):
        values.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return values


def linear(warmup, total):
    return lambda o: hf.get_linear_schedule_with_warmup(o, warmup, total)


def cosine(warmup, total):
    return lambda o: hf.get_cosine_schedule_with_warmup(o, warmup, total)


def cosine_floor(warmup, total, floor):
    return lambda o: hf.get_cosine_with_min_lr_schedule_with_warmup(o, warmup, total, min_lr_rate=floor)


def constant(warmup):
    return lambda o: hf.get_constant_schedule_with_warmup(o, warmup)


def wsd(warmup, decay, total, shape, floor):
    return lambda o: hf.get_wsd_schedule(
        o, warmup, decay, num_training_steps=total, decay_type=shape, min_lr_ratio=floor
    )


# (kind, wsd decay, peak, total, warmup, decay, floor, schedule)
CASES = [
    ("kLinear", "kCosine", 1e-4, 20, 0, 0, 0, linear(0, 20)),
    ("kLinear", "kCosine", 3e-4, 20, 7, 0, 0, linear(7, 20)),
    ("kLinear", "kCosine", 5e-5, 9, 9, 0, 0, linear(9, 9)),
    ("kCosine", "kCosine", 1e-4, 22, 0, 0, 0, cosine(0, 22)),
    ("kCosine", "kCosine", 2e-5, 22, 3, 0, 0, cosine(3, 22)),
    ("kCosine", "kCosine", 6e-4, 22, 5, 0, 0.1, cosine_floor(5, 22, 0.1)),
    ("kConstant", "kCosine", 1e-4, 20, 0, 0, 0, constant(0)),
    ("kConstant", "kCosine", 7e-4, 20, 6, 0, 0, constant(6)),
    ("kWsd", "kCosine", 1e-4, 20, 4, 6, 0, wsd(4, 6, 20, "cosine", 0)),
    ("kWsd", "kLinear", 3e-4, 20, 5, 7, 0.1, wsd(5, 7, 20, "linear", 0.1)),
    ("kWsd", "kOneMinusSqrt", 3e-4, 20, 0, 9, 0.05, wsd(0, 9, 20, "1-sqrt", 0.05)),
]

print("// Written by make_lr_table.py.")
for kind, shape, peak, total, warmup, decay, floor, schedule in CASES:
    print(
        f"{{{{LrScheduleKind::{kind}, {peak!r}, {total}, {warmup}, {decay}, WsdDecay::{shape}, {floor!r}}},"
    )
    print(" {" + ", ".join(repr(v) for v in rates(peak, schedule)) + "}},")

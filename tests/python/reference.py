"""The same training in plain PyTorch: AdamW, clipping, cosine, the order of orlop.DataLoader."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers

import orlop


def load(folder: Path) -> torch.nn.Module:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.train()


def batch_loss_sum(model: torch.nn.Module, batch: orlop.MicroBatch) -> torch.Tensor:
    """Summed cross-entropy over the labelled tokens; every packed document alone, from position 0."""
    device = next(model.parameters()).device
    tokens = torch.from_numpy(np.array(batch.tokens)).long().to(device)
    labels = torch.from_numpy(np.array(batch.labels)).long().to(device)
    total = torch.zeros((), device=device)
    for begin, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        if (labels[begin:end] == orlop.IGNORED_LABEL).all():
            continue
        logits = model(tokens[None, begin:end]).logits[0]
        total = total + F.cross_entropy(logits, labels[begin:end], reduction="sum")
    return total


def labelled(batches: list[orlop.MicroBatch]) -> int:
    return sum(int((batch.labels != orlop.IGNORED_LABEL).sum()) for batch in batches)


def eval_loss(model: torch.nn.Module, batches: list[orlop.MicroBatch]) -> float:
    with torch.no_grad():
        return sum(batch_loss_sum(model, batch).item() for batch in batches) / labelled(batches)


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict]:
    """Norms and biases without decay, as transformers' Trainer splits them."""
    parts: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        parts[not (name.endswith("bias") or "norm" in name or ".ln_" in name)].append(parameter)
    return [
        {"params": parts[True], "weight_decay": weight_decay},
        {"params": parts[False], "weight_decay": 0.0},
    ]


def cosine(step: int, config: orlop.EngineConfig) -> float:
    """transformers' get_cosine_schedule_with_warmup at the step that is about to run, from 0."""
    schedule = config.schedule
    if step < schedule.warmup_steps:
        return step / max(1, schedule.warmup_steps)
    progress = (step - schedule.warmup_steps) / max(1, schedule.total_steps - schedule.warmup_steps)
    return 0.5 * (1 + math.cos(math.pi * progress))


def train(
    model: torch.nn.Module,
    loader: orlop.DataLoader,
    config: orlop.EngineConfig,
    steps: int,
    autocast: torch.dtype | None = None,
) -> list[float]:
    """Losses of `steps` steps; the model holds the final weights."""
    device = next(model.parameters()).device.type
    rate = config.optimizer.learning_rate
    optimizer = torch.optim.AdamW(
        parameter_groups(model, config.optimizer.weight_decay),
        lr=rate,
        betas=(config.optimizer.beta1, config.optimizer.beta2),
        eps=config.optimizer.eps,
    )
    losses = []
    for step in range(steps):
        batches = [loader.next() for _ in range(config.batch.accumulation_steps)]
        count = labelled(batches)
        loss = 0.0
        for batch in batches:
            with torch.autocast(device, dtype=autocast, enabled=autocast is not None):
                part = batch_loss_sum(model, batch) / count
            part.backward()
            loss += part.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate * cosine(step, config)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return losses

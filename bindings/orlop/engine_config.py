"""RunConfig -> the native EngineConfig."""

from __future__ import annotations

import math

from . import _orlop
from .config import MAX_COUNT, RunConfig
from .errors import UsageError

_PRECISIONS = {
    "fp32": _orlop.Precision.F32,
    "bf16": _orlop.Precision.BF16,
    "fp16": _orlop.Precision.F16,
}
_SCHEDULES = {
    "constant": _orlop.ScheduleKind.CONSTANT,
    "linear": _orlop.ScheduleKind.LINEAR,
    "cosine": _orlop.ScheduleKind.COSINE,
    "wsd": _orlop.ScheduleKind.WSD,
}


def batch_config(config: RunConfig) -> _orlop.BatchConfig:
    return _orlop.BatchConfig(
        micro_batch_size=config.micro_batch,
        sequence_length=config.seq_len,
        accumulation_steps=config.accum,
    )


def total_steps(config: RunConfig, rows_per_epoch: int, world_size: int = 1) -> int:
    """Optimizer steps of the run; the last one may be partly filled from the next epoch."""
    if config.steps is not None:
        return config.steps
    epochs = config.epochs if config.epochs is not None else 1.0
    steps = epochs * rows_per_epoch / (config.micro_batch * config.accum * world_size)
    if steps > MAX_COUNT:
        raise UsageError(
            f"--epochs {epochs:g}: {steps:.3g} steps of this data; at most {MAX_COUNT} can be made"
        )
    return max(1, math.ceil(steps))


def engine_config(config: RunConfig, steps: int) -> _orlop.EngineConfig:
    """`steps`: the length of the learning rate's course."""
    warmup = config.warmup_steps
    if warmup is None:
        warmup = math.ceil(config.warmup_ratio * steps)
    bf16_moments = config.moments == "bf16"
    return _orlop.EngineConfig(
        device=config.device,
        precision=_PRECISIONS[config.precision],
        gradient_wire=_orlop.DType.BF16 if config.grad_wire == "bf16" else _orlop.DType.F32,
        batch=batch_config(config),
        optimizer=_orlop.OptimizerConfig(
            learning_rate=config.lr,
            beta1=config.beta1,
            beta2=config.beta2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            decoupled=config.optim == "adamw",
            moments=_orlop.DType.BF16 if bf16_moments else _orlop.DType.F32,
            max_grad_norm=config.clip,
        ),
        schedule=_orlop.ScheduleConfig(
            kind=_SCHEDULES[config.schedule],
            warmup_steps=warmup,
            total_steps=steps,
            min_lr_ratio=config.min_lr_ratio,
            decay_ratio=config.decay_ratio,
        ),
        limits=_orlop.LimitsConfig(
            device_bytes=config.device_mem,
            host_bytes=config.host_mem,
            snapshot_bytes=config.snapshot_mem,
            nvme_bytes=config.nvme_mem,
            nvme_writes_per_day_bytes=config.nvme_writes_per_day,
        ),
        nvme=_orlop.NvmeConfig(
            paths=config.nvme or [],
            block_bytes=config.nvme_block,
            queue_depth=config.nvme_queue_depth,
            direct=config.nvme_direct,
            engine=config.nvme_engine,
            verify=config.nvme_verify,
        ),
        placement=_orlop.PlacementConfig(
            prefetch_depth=config.prefetch,
            resident_blocks=config.resident_blocks,
            device_optimizer_blocks=config.device_optimizer_blocks,
            activations=None
            if config.activations is None
            else _orlop.Tier.__members__[config.activations.upper()],
            wave=config.wave,
            nvme_optimizer_blocks=config.nvme_optimizer_blocks,
            nvme_param_blocks=config.nvme_param_blocks,
            nvme_optimizer_share=config.nvme_optimizer_share,
            nvme_param_share=config.nvme_param_share,
        ),
        threads=config.threads,
        reference_ops=config.reference_ops,
        max_skipped_steps=config.max_skipped_steps,
        seed=config.seed,
        checkpoint_dir=config.output or "",
    )

"""Hugging Face Trainer and Accelerate with optimizer states in host memory.

    trainer = Trainer(model, args, ..., optimizer_cls_and_kwargs=(orlop.AdamW, {"lr": 2e-5}))

is enough. `attach(trainer)` reads the hyperparameters from the TrainingArguments and also hides the update
under the next forward, logs what was skipped, and ends fp16 runs that no smaller loss scale can cure.
"""

from __future__ import annotations

import functools

from . import errors
from .torch_support import require_torch

torch = require_torch("orlop.hf")

from .adamw import AdamW  # noqa: E402
from .grad_scaler import GradScaler  # noqa: E402


def _transformers():
    try:
        import transformers
    except ImportError as error:
        raise errors.UsageError(
            f"orlop.hf.attach needs transformers ({error}): pip install transformers"
        ) from None
    return transformers


def attach(trainer, **options):
    """Gives a Trainer, before train(), orlop.AdamW with the hyperparameters of its arguments.

    options: those of orlop.AdamW, such as gradients= or moments=; module=None turns hiding off. Returns
    the trainer. Checkpoints of the Trainer hold and resume the optimizer as usual.
    """
    transformers = _transformers()
    if trainer.optimizer is not None and not isinstance(trainer.optimizer, AdamW):
        # The Trainer was given an optimizer of its own: its groups and state are taken over.
        trainer.optimizer = AdamW.from_torch(trainer.optimizer, **{"module": trainer.model, **options})
    args = trainer.args
    trainer.optimizer_cls_and_kwargs = (
        AdamW,
        {
            "lr": args.learning_rate,
            "betas": (args.adam_beta1, args.adam_beta2),
            "eps": args.adam_epsilon,
            "module": trainer.model,
            **options,
        },
    )
    trainer.add_callback(_make_callback(transformers, trainer))
    trainer.log = functools.partial(_log, trainer, trainer.log)
    scaler = getattr(trainer.accelerator, "scaler", None)
    if scaler is not None and not isinstance(scaler, GradScaler):
        trainer.accelerator.scaler = GradScaler(
            scaler._device, init_scale=scaler._init_scale, growth_interval=scaler.get_growth_interval()
        )
    return trainer


def _make_callback(transformers, trainer):
    class OrlopCallback(transformers.TrainerCallback):
        """Leaves complete weights to whoever reads them after a save or at the end."""

        def on_save(self, args, state, control, **kwargs):
            self.on_train_end(args, state, control)

        def on_train_end(self, args, state, control, **kwargs):
            optimizer = unwrap(trainer.optimizer)
            if isinstance(optimizer, AdamW):
                optimizer.synchronize()

    return OrlopCallback()


def _log(trainer, log, logs, *rest, **kwargs):
    """Trainer.log() with the optimizer's numbers."""
    optimizer = unwrap(trainer.optimizer)
    if isinstance(optimizer, AdamW):
        report = optimizer.memory_report().items()
        host_gib = sum(size for purpose, size in report if " on " not in purpose) / 2**30
        logs = {**logs, "orlop_skipped_steps": optimizer.skipped_steps, "orlop_host_gib": round(host_gib, 4)}
    log(logs, *rest, **kwargs)


def prepare(accelerator, model, optimizer, **options):
    """`accelerator.prepare(model, optimizer)`, where a torch AdamW or Adam becomes an orlop one first.

    Accumulation, clipping and scaling through the accelerator work as usual.
    """
    optimizer = AdamW.from_torch(optimizer, **{"module": model, **options})
    return accelerator.prepare(model, optimizer)


def unwrap(optimizer):
    """The optimizer inside Accelerate's wrapper."""
    while optimizer is not None and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer

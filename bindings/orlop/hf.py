"""Hugging Face Trainer and Accelerate with optimizer states in host memory.

    trainer = Trainer(model, args, ..., optimizer_cls_and_kwargs=(orlop.AdamW, {"lr": 2e-5}))

is enough, from transformers 4.47 on. `attach(trainer)` reads the hyperparameters from the TrainingArguments and also
hides the update under the next forward, logs what was skipped, and ends fp16 runs that no smaller loss scale can cure.
"""

from __future__ import annotations

import functools

from . import errors
from .torch_support import require_torch

torch = require_torch("orlop.hf")

from .adamw import Adam, AdamW  # noqa: E402
from .grad_scaler import GradScaler  # noqa: E402

_ADAMW_NAMES = ("adamw_torch", "adamw_torch_fused")  # of TrainingArguments.optim
_IN_PLACE_OF = {torch.optim.AdamW: AdamW, torch.optim.Adam: Adam}


def _transformers():
    try:
        import transformers
    except ImportError as error:
        raise errors.UsageError(
            f"orlop.hf.attach needs transformers ({error}): pip install transformers"
        ) from None
    return transformers


def attach(trainer, **options):
    """Gives a Trainer, before train(), orlop.AdamW with the hyperparameters of its arguments, or in the place of the
    optimizer that it was given, as an object or as optimizer_cls_and_kwargs. Other kinds than Adam's are refused.

    options: those of orlop.AdamW, such as gradients= or moments=; module=None turns hiding off. Returns
    the trainer. Checkpoints of the Trainer hold and resume the optimizer as usual. A callback that reads weights
    between steps, to average them, say, calls unwrap(optimizer).synchronize() before.
    """
    transformers = _transformers()
    if not hasattr(trainer, "optimizer_cls_and_kwargs"):  # it would train with an optimizer of its own
        raise errors.UsageError(
            f"orlop.hf.attach needs transformers 4.47 or newer, {transformers.__version__} is installed: "
            "pip install --upgrade transformers"
        )
    if trainer.optimizer is not None:
        trainer.optimizer = _taken_over(unwrap(trainer.optimizer), trainer.model, options)
    kind, kwargs = _asked_for(trainer)
    trainer.optimizer_cls_and_kwargs = kind, {**kwargs, **options}
    trainer.create_optimizer = functools.partial(_create, trainer, trainer.create_optimizer, options)
    trainer.add_callback(_make_callback(transformers, trainer))
    trainer.log = functools.partial(_log, trainer, trainer.log)
    scaler = getattr(trainer.accelerator, "scaler", None)
    if scaler is not None and scaler.is_enabled() and not isinstance(scaler, GradScaler):
        trainer.accelerator.scaler = GradScaler(
            scaler._device,
            scaler._init_scale,
            scaler.get_growth_factor(),
            scaler.get_backoff_factor(),
            scaler.get_growth_interval(),
        )
    return trainer


def _taken_over(optimizer, module, options):
    """An optimizer of Orlop's with the groups and the state of torch's. One that is there already has its options."""
    if not isinstance(optimizer, AdamW):
        return AdamW.from_torch(optimizer, **{"module": module, **options})
    if options:
        raise errors.UsageError(
            f"orlop.hf: the optimizer is an orlop.{type(optimizer).__name__} already, which takes {', '.join(options)} "
            "where it is made"
        )
    return optimizer


def _asked_for(trainer):
    """The class of Orlop's and the arguments for the optimizer that a Trainer would have made."""
    args = trainer.args
    if trainer.optimizer_cls_and_kwargs is None:
        if args.optim not in _ADAMW_NAMES and trainer.optimizer is None:
            name = str(getattr(args.optim, "value", args.optim))
            raise errors.UsageError(
                f"orlop.hf.attach: optim={name!r} of the TrainingArguments is another optimizer than orlop.AdamW; "
                f"use {' or '.join(map(repr, _ADAMW_NAMES))}, or leave attach() out"
            )
        betas = args.adam_beta1, args.adam_beta2
        return AdamW, {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon}
    kind, kwargs = trainer.optimizer_cls_and_kwargs
    if isinstance(kind, type) and issubclass(kind, AdamW):
        return kind, kwargs
    if kind not in _IN_PLACE_OF:
        raise errors.UsageError(
            f"orlop.hf.attach: {getattr(kind, '__name__', kind)} of optimizer_cls_and_kwargs cannot run on host "
            "states; torch.optim.AdamW, torch.optim.Adam, orlop.AdamW and orlop.Adam can"
        )
    # fused and foreach only choose how torch computes the same step.
    return _IN_PLACE_OF[kind], {k: v for k, v in kwargs.items() if k not in ("fused", "foreach")}


def _create(trainer, create, options, *args, **kwargs):
    """Trainer.create_optimizer() over the model of the moment, which model_init makes anew for every train()."""
    if "module" not in options:
        trainer.optimizer_cls_and_kwargs[1]["module"] = trainer.model
    return create(*args, **kwargs)


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
        host_gib = round(optimizer.host_bytes() / 2**30, 4)
        logs = {**logs, "orlop_skipped_steps": optimizer.skipped_steps, "orlop_host_gib": host_gib}
    log(logs, *rest, **kwargs)


def prepare(accelerator, model, optimizer, **options):
    """`accelerator.prepare(model, optimizer)`, where a torch AdamW or Adam becomes an orlop one first.

    Accumulation, clipping and scaling through the accelerator work as usual.
    """
    return accelerator.prepare(model, _taken_over(optimizer, model, options))


def unwrap(optimizer):
    """The optimizer inside Accelerate's wrapper."""
    while optimizer is not None and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer

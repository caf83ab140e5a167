"""DeepSpeedCPUAdam and FusedAdam: orlop.AdamW under their arguments."""

from __future__ import annotations

from ... import errors
from ...adamw import AdamW


class DeepSpeedCPUAdam(AdamW):
    """adamw_mode: decoupled weight decay, else into the gradient. fp32_optimizer_states=False: moments in bf16.
    States live, and are updated, in host memory. Further options are those of orlop.AdamW."""

    def __init__(self, model_params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, weight_decay=0,
                 amsgrad=False, adamw_mode=True, fp32_optimizer_states=True, **options):  # fmt: skip
        if not bias_correction:
            raise errors.UsageError("DeepSpeedCPUAdam: bias_correction=False is not implemented")
        self._decoupled = adamw_mode
        if not fp32_optimizer_states:
            options["moments"] = "bf16"
        options.setdefault("states", "host")
        super().__init__(model_params, lr, tuple(betas), eps, weight_decay, amsgrad, **options)


class FusedAdam(DeepSpeedCPUAdam):
    """States that fit live, and are updated, on the GPU; the arguments are those of DeepSpeed's GPU optimizer."""

    def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, adam_w_mode=True,
                 weight_decay=0.0, amsgrad=False, set_grad_none=True, **options):  # fmt: skip
        options.setdefault("states", "auto")
        super().__init__(
            params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode, **options
        )

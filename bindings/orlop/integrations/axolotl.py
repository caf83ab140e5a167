"""Axolotl: `plugins: [orlop.integrations.axolotl.Plugin]` in its YAML."""

from __future__ import annotations

from axolotl.integrations.base import BasePlugin

from ..adamw import AdamW


class Plugin(BasePlugin):
    """Trains with orlop.AdamW, whose hyperparameters come from Axolotl's own keys."""

    def create_optimizer(self, cfg, trainer):
        args = trainer.args
        decay = set(trainer.get_decay_parameter_names(trainer.model))
        named = [(name, p) for name, p in trainer.model.named_parameters() if p.requires_grad]
        return AdamW(
            [
                {"params": [p for name, p in named if name in decay], "weight_decay": args.weight_decay},
                {"params": [p for name, p in named if name not in decay], "weight_decay": 0.0},
            ],
            lr=args.learning_rate,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
            module=trainer.model,
        )

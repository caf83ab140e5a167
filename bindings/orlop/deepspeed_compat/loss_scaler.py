"""The loss scale of fp16 training, by the rule of DeepSpeed's DynamicLossScaler."""

from __future__ import annotations

from .. import errors


class LossScaler:
    """scale multiplies the loss; update() follows every step."""

    def __init__(self, config):
        fixed = config["fp16.loss_scale"]
        self.dynamic = config["fp16.enabled"] and fixed == 0
        self.scale = 1.0
        if config["fp16.enabled"]:
            self.scale = 2.0 ** config["fp16.initial_scale_power"] if self.dynamic else fixed
        self.window = config["fp16.loss_scale_window"]
        self.hysteresis = config["fp16.hysteresis"]
        self.consecutive = config["fp16.consecutive_hysteresis"]
        self.floor = max(config["fp16.min_loss_scale"], 2.0**-24)
        self.max_failures = 10  # overflows in a row that no smaller scale can cure
        self._left = self.hysteresis
        self._good = 0
        self._failures = 0

    def update(self, overflow: bool, first_bad: str) -> None:
        """Ends a step. Raises NonFiniteError naming `first_bad` when smaller scales cannot help."""
        if not self.dynamic:
            return
        if not overflow:
            self._failures = 0
            self._good += 1
            if self.consecutive:
                self._left = self.hysteresis
            if self._good % self.window == 0:
                self.scale *= 2.0
                self._left = self.hysteresis
            return
        self._good = 0
        if self._left > 1:
            self._left -= 1
            return
        self._failures = self._failures + 1 if self.scale <= self.floor else 0
        self.scale = max(self.scale / 2.0, self.floor)
        if self._failures >= self.max_failures:
            raise errors.NonFiniteError(
                f"the gradients overflowed {self._failures} times in a row at the smallest loss scale, "
                f"{self.floor}; first: {first_bad}"
            )

    def state_dict(self) -> dict:
        return {
            "dynamic": self.dynamic,
            "scale": self.scale,
            "left": self._left,
            "good": self._good,
            "failures": self._failures,
        }

    def load_state_dict(self, state: dict) -> None:
        """Goes on from a dynamic scale where this one is dynamic, too; else the configuration's stays."""
        # Format 1 does not say; only dynamic ones count good steps.
        was_dynamic = state.get("dynamic", state["good"] > 0)
        if not (self.dynamic and was_dynamic):
            return
        self.scale, self._left = float(state["scale"]), int(state["left"])
        self._good, self._failures = int(state["good"]), int(state["failures"])

"""Host time that Orlop's hooks take inside of a PyTorch loop."""

from __future__ import annotations

import time
from collections import defaultdict

import torch

from orlop import block_hooks, forward_gate, gradient_batch


class HookClock:
    """By pass and hook, from before the first of them is registered. `replace`: setattr, or what undoes it later."""

    # module or class, hook
    HOOKS = (
        (block_hooks, "_enter"),
        (block_hooks, "_leave"),
        (block_hooks, "_before_backward"),
        (forward_gate, "_before_forward"),
        (gradient_batch.Unit, "_arrive"),
        (gradient_batch.Unit, "_arrive_last"),
        (gradient_batch.Collector, "_end"),
        (torch.cuda.Event, "synchronize"),  # inside of these: waits for the device, which are no work
    )

    def __init__(self, replace=setattr):
        self._calls: list[tuple[str, bool, float]] = []  # hook, whether in a forward, seconds
        for module, name in self.HOOKS:
            replace(module, name, self._timed(name.lstrip("_"), getattr(module, name)))

    def _timed(self, name, hook):
        graph_task, clock, calls = torch._C._current_graph_task_id, time.perf_counter, self._calls

        def timed(*args):
            begin = clock()
            try:
                return hook(*args)
            finally:
                calls.append((name, graph_task() == -1, clock() - begin))

        return timed

    def take(self) -> dict[tuple[str, str], float]:
        """Seconds by pass and hook since the last call."""
        seconds: dict[tuple[str, str], float] = defaultdict(float)
        for name, in_forward, taken in self._calls:
            if name == "synchronize" and in_forward:  # between the passes
                continue
            # The end comes when the graph is done.
            seconds["forward" if in_forward and name != "end" else "backward", name] += taken
        self._calls.clear()
        return dict(seconds)

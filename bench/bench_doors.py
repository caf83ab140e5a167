"""The PyTorch doors beside PyTorch's own forward and backward, in one run.

    PYTHONPATH=build/python python bench/bench_doors.py                    # Llama of 3.02 B parameters on one GPU
    PYTHONPATH=build/python python bench/bench_doors.py --shape tiny --device cpu --steps 5
    PYTHONPATH=build/python python bench/bench_doors.py --parts compute,door2 --micro-batches 2 --sequences 16

Parts, each on its own model of the same seed and shape, which is gone before the next one begins:
    compute  forward and backward alone, weights resident, no optimizer: what the others are compared with
    door1    orlop.AdamW(..., module=model), weights resident, states where there is room
    door2    orlop.wrap with limits.gpu = --limit, all states in host memory
    auto     orlop.wrap with config="auto", states where there is room
Every part but compute clips to a norm of 1.0 and updates exactly. A step is forward and backward of all its
micro-batches with gradient checkpointing; it ends when the norm of its gradients is known (compute: when the device
is done), so that the update, which runs under the next forward, counts in the next step.

Printed for each part: the median step, its range, tokens per second, the ratio to compute (for each number of
micro-batches), how much longer each pass is than compute's, where the host spent the step, the time of Orlop's hooks
per block and pass, where weights and states are, and the peaks of device memory (torch's allocator) and host memory
(resident set).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import resource
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
from hook_clock import HookClock

import orlop
from orlop import forward_gate
from orlop.wrapping import stream_of

SHAPES = {
    "l3": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
           "num_key_value_heads": 8, "vocab_size": 32000},
    "l1": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
           "num_key_value_heads": 4, "vocab_size": 32000},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 256},
}  # fmt: skip
# Sequences of a micro-batch, tokens of a sequence.
TOKENS = {"l3": (8, 2048), "l1": (8, 2048), "tiny": (2, 32)}
PARTS = ("compute", "door1", "door2", "auto")
GIB = 2**30


class Passes:
    """Times at which the device ends each forward and backward."""

    def __init__(self, device):
        self._on_device = device.type == "cuda"
        self._ends: list = []
        self.end()

    def end(self) -> None:
        if self._on_device:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._ends.append(event)
        else:
            self._ends.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Of forward and backward of every micro-batch, in order. The device is done."""
        pairs = itertools.pairwise(self._ends)
        if self._on_device:
            return [before.elapsed_time(after) * 1e-3 for before, after in pairs]
        return [after - before for before, after in pairs]


class Host:
    """The part's highest resident set, where the kernel lets it be reset; else that of the whole run."""

    def begin(self) -> None:
        self.is_reset = False
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
            self.is_reset = True

    def peak_bytes(self) -> int:
        if self.is_reset:
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def part_of(name: str) -> str:
    """ "layers.7" for a parameter of block 7, else the name of its module."""
    words = name.split(".")
    numbers = [i for i, word in enumerate(words) if word.isdigit()]
    return ".".join(words[numbers[0] - 1 : numbers[0] + 1]) if numbers else ".".join(words[:-1])


def runs(parts) -> str:
    """ "embed_tokens, layers.0 to layers.6": neighbours with numbers are drawn together."""
    texts: list[list[str]] = []
    for part in parts:
        stem, _, number = part.rpartition(".")
        last = texts[-1][-1].rpartition(".") if texts else ("", "", "")
        if number.isdigit() and last[0] == stem and last[2].isdigit() and int(last[2]) + 1 == int(number):
            texts[-1][1:] = [part]
        else:
            texts.append([part])
    return ", ".join(" to ".join(text) for text in texts)


class Bench:
    def __init__(self, options):
        self.options = options
        self.device = torch.device(options.device)
        self.sequences, self.length = TOKENS[options.shape]
        self.sequences = options.sequences or self.sequences
        self.host = Host()
        self.hooks = HookClock()
        self.passes: list[list[float]] = []  # of the steps since the last measurement
        self.results: list[dict] = []

    # --- one part -------------------------------------------------------------------------------

    def build(self):
        import transformers

        config = transformers.LlamaConfig(**SHAPES[self.options.shape], max_position_embeddings=self.length,
                                          tie_word_embeddings=False, use_cache=False)  # fmt: skip
        torch.manual_seed(0)
        with self.device:
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation="sdpa"
            )
        model = model.to(self.device).train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def open(self, part, model):
        hyper = {"lr": 1e-5, "weight_decay": 0.1}
        if part == "compute":
            return None
        if part == "door1":
            return orlop.AdamW(model.parameters(), module=model, **hyper)
        if part == "auto":
            return orlop.wrap(model, hyper, "auto")[1]
        return orlop.wrap(model, hyper, {"limits": {"gpu": self.options.limit}}, states="host")[1]

    def run(self, part: str) -> None:
        self.host.begin()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        model = self.build()
        self.wait()
        built = time.perf_counter()
        optimizer = self.open(part, model)
        self.wait()
        opened = time.perf_counter()
        print(f"\n{part}: model {built - begin:.1f} s, door {opened - built:.1f} s", flush=True)
        try:
            for micro_batches in self.options.micro_batches:
                self.measure(part, model, optimizer, micro_batches)
        finally:
            if optimizer is not None:
                optimizer.synchronize()
                optimizer.close()
            if part in ("door2", "auto"):
                orlop.unwrap(model)
            del model, optimizer
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        print(f"  whole part {time.perf_counter() - begin:.1f} s", flush=True)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def batches(self, model, count):
        generator = torch.Generator().manual_seed(1)
        shape = (count, self.sequences, self.length)
        tokens = torch.randint(0, model.config.vocab_size, shape, generator=generator)
        return list(tokens.to(self.device))

    # --- steps ----------------------------------------------------------------------------------

    def step(self, model, optimizer, batches) -> dict[str, float]:
        """Host seconds of the parts of one step, `end` the time at which it ended."""
        marks = {}
        passes = Passes(self.device)
        begin = time.perf_counter()
        for tokens in batches:
            loss = model(input_ids=tokens, labels=tokens).loss / len(batches)
            passes.end()
            loss.backward()
            passes.end()
        marks["issue"] = time.perf_counter() - begin
        self.wait()
        self.passes.append(passes.seconds())
        marks["device"] = time.perf_counter() - begin - marks["issue"]
        if optimizer is None:
            marks["end"] = time.perf_counter()
            model.zero_grad(set_to_none=True)
            return marks
        begin = time.perf_counter()
        optimizer.clip_grad_norm_(1.0)
        marks["end"] = time.perf_counter()
        marks["clip"] = marks["end"] - begin
        optimizer.step()
        optimizer.zero_grad()
        marks["step"] = time.perf_counter() - marks["end"]
        return marks

    def measure(self, part, model, optimizer, micro_batches) -> None:
        batches = self.batches(model, micro_batches)
        for _ in range(self.options.warmup):
            last = self.step(model, optimizer, batches)["end"]
        seconds, marks, hooks = [], [], []
        self.hooks.take()
        self.passes.clear()
        for _ in range(self.options.steps):
            mark = self.step(model, optimizer, batches)
            seconds.append(mark["end"] - last)
            last = mark.pop("end")
            marks.append(mark)
            hooks.append(self.hooks.take())
        median = statistics.median(seconds)
        tokens = micro_batches * self.sequences * self.length
        result = {
            "part": part, "micro_batches": micro_batches, "tokens": tokens, "median_s": median,
            "min_s": min(seconds), "max_s": max(seconds), "steps": len(seconds),
            "passes_s": [statistics.median(times) for times in zip(*self.passes, strict=True)],
            "host_s": {key: statistics.median(m[key] for m in marks) for key in marks[0]},
            "hooks_us": self.hook_times(model, hooks, micro_batches) if optimizer is not None else {},
            "sums_gib": self.sums(optimizer) if optimizer is not None else {},
            "host_peak_gib": self.host.peak_bytes() / GIB,
            "device_peak_gib": torch.cuda.max_memory_allocated() / GIB if self.device.type == "cuda" else 0.0,
        }  # fmt: skip
        base = [r for r in self.results if r["part"] == "compute" and r["micro_batches"] == micro_batches]
        result["ratio"] = base[0]["median_s"] / median if base else None
        result["added_us"] = self.added(model, result, base[0]) if base else None
        if optimizer is not None:
            result["states"] = self.states(optimizer)
        self.results.append(result)
        self.print_result(result)
        if optimizer is not None:
            self.print_places(part, model, optimizer)

    @staticmethod
    def sums(optimizer) -> dict[str, float]:
        """Where the fp32 sums of micro-batches are."""
        report = optimizer.memory_report().items()
        return {purpose: size / GIB for purpose, size in report if purpose.startswith("gradient sums")}

    def hook_times(self, model, steps, micro_batches) -> dict[str, float]:
        """Microseconds for each block in each pass, medians over the steps, by pass and by hook."""
        count = len(forward_gate.find_blocks(model)) * micro_batches * 1e-6
        times = {}
        for which in ("forward", "backward"):
            totals = [
                sum(-s if name == "synchronize" else s for (p, name), s in step.items() if p == which)
                for step in steps
            ]
            times[which] = statistics.median(totals) / count
        for key in sorted({key for step in steps for key in step}):
            times[" ".join(key)] = statistics.median(step.get(key, 0.0) for step in steps) / count
        return times

    @staticmethod
    def added(model, result, base) -> list[float]:
        """Microseconds by which each pass is longer than PyTorch's own in the same run, for each block."""
        blocks = len(forward_gate.find_blocks(model))
        pairs = zip(result["passes_s"], base["passes_s"], strict=True)
        return [(seconds - plain) / blocks * 1e6 for seconds, plain in pairs]

    # --- print ----------------------------------------------------------------------------------

    @staticmethod
    def states(optimizer) -> dict[str, dict]:
        """By place: GiB of masters and moments, parameters, and the parts of the model that these belong to."""
        found = {}
        for where, place in optimizer.placement().items():
            parts: dict[str, int] = defaultdict(int)
            for name in place["parameters"]:
                parts[part_of(name)] += 1
            found[where] = {
                "gib": place["bytes"] / GIB,
                "parameters": len(place["parameters"]),
                "parts": parts,
            }
        return found

    def print_places(self, part, model, optimizer) -> None:
        if part != "door1":
            stream = stream_of(model)
            resident = sum(block.resident for block in stream.blocks)
            print(f"    blocks resident: {resident} of {len(stream.blocks)}, "
                  f"{sum(b.bytes for b in stream.blocks) / GIB:.2f} GiB in all")  # fmt: skip
        for where, place in self.states(optimizer).items():
            print(f"    states {'in host memory' if where == 'host' else f'in HBM ({where})'}: {place['gib']:.2f} GiB "
                  f"of {place['parameters']} parameters: {runs(place['parts'])}")  # fmt: skip
        unpinned = sum(link.unpinned_bytes for link in optimizer._links.values())
        if unpinned:
            print(f"    not pinned: {unpinned / GIB:.2f} GiB", flush=True)

    def print_result(self, r) -> None:
        ratio = f", {r['ratio']:.3f} of compute" if r["ratio"] is not None else ""
        print(f"  {r['micro_batches']} x {r['tokens'] // r['micro_batches']} tokens: {r['median_s']:.4f} s "
              f"({r['min_s']:.4f} to {r['max_s']:.4f}, {r['steps']} steps), "
              f"{r['tokens'] / r['median_s']:,.0f} tok/s{ratio}")  # fmt: skip
        added = ""
        if r["ratio"] is not None and r["part"] != "compute":
            added = ", of compute's " + ", ".join(f"{us:+.0f}" for us in r["added_us"]) + " us a block"
        print(
            "    forward and backward: " + ", ".join(f"{s * 1e3:.0f}" for s in r["passes_s"]) + " ms" + added
        )
        print("    host: " + ", ".join(f"{key} {value * 1e3:.1f} ms" for key, value in r["host_s"].items()))
        if r["hooks_us"]:
            print("    hooks, us a block: "
                  + ", ".join(f"{key} {value:.0f}" for key, value in r["hooks_us"].items()))  # fmt: skip
        for purpose, size in r["sums_gib"].items():
            print(f"    {purpose}: {size:.2f} GiB")
        print(
            f"    peaks: device {r['device_peak_gib']:.2f} GiB, host {r['host_peak_gib']:.2f} GiB", flush=True
        )


def parse(arguments) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="l3")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--parts", default=",".join(PARTS), help="in this order; compute gives the ratios")
    parser.add_argument("--micro-batches", default="1,4", help="of a step; one measurement for each")
    parser.add_argument("--sequences", type=int, help="of a micro-batch; 8 for l3")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2, help="steps before the first that counts")
    parser.add_argument("--limit", default="24GiB", help="limits.gpu of door2")
    parser.add_argument("--json", help="a file for the figures")
    options = parser.parse_args(arguments)
    options.parts = options.parts.split(",")
    options.micro_batches = [int(count) for count in options.micro_batches.split(",")]
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"--parts {unknown[0]} is none of {', '.join(PARTS)}")
    if options.warmup < 1 or options.steps < 1:
        parser.error("--warmup and --steps are 1 or more")
    return options


def main(arguments=None) -> int:
    options = parse(arguments)
    begin = time.perf_counter()
    bench = Bench(options)
    name = torch.cuda.get_device_name() if bench.device.type == "cuda" else "CPU"
    shape = ", ".join(f"{key} {value}" for key, value in SHAPES[options.shape].items())
    print(f"{name}, torch {torch.__version__}, {orlop._orlop.default_threads()} threads; bf16 Llama: {shape}")
    for part in options.parts:
        bench.run(part)
    if options.json:
        Path(options.json).write_text(json.dumps({"device": name, "results": bench.results}, indent=1) + "\n")
    print(f"\n{time.perf_counter() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

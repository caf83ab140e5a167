"""torch.optim.AdamW(fused=True) and bench_cpu_adam side by side, parameter for parameter.

One contiguous fp32 tensor, its gradient and its two moments, each on huge pages and touched before the
first step; the same threads and the same number of parameters for both. The two take turns, so that both
meet the same neighbours on the machine, and the ratio is taken turn by turn. torch counts 28 bytes a
parameter (p, m, v read and written, g read), Orlop 26 (a bf16 gradient).

    python bench/peers/torch_adamw.py --bench build/bench/bench_cpu_adam
"""

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import time

import numpy as np
import torch

BYTES_PER_PARAMETER = 28


def huge_tensor(numel: int) -> torch.Tensor:
    """An fp32 tensor of zeros (numel) in anonymous memory that asks for huge pages."""
    memory = mmap.mmap(-1, 4 * numel, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.from_numpy(np.frombuffer(memory, dtype=np.float32))
    return tensor.zero_()


class TorchAdamW:
    """One parameter with its optimizer, ready to be stepped."""

    def __init__(self, numel: int):
        self.numel = numel
        self.parameter = torch.nn.Parameter(huge_tensor(numel))
        gradient = huge_tensor(numel)
        gradient.copy_(1e-3 * (1 + torch.arange(numel) % 7))
        self.parameter.grad = gradient
        self.optimizer = torch.optim.AdamW([self.parameter], lr=1e-4, weight_decay=0.1, fused=True)
        self.optimizer.state[self.parameter] = {
            "step": torch.tensor(0.0),
            "exp_avg": huge_tensor(numel),
            "exp_avg_sq": huge_tensor(numel),
        }

    def rate(self, repeats: int) -> float:
        """Parameters per second, median of `repeats` steps after two that warm up."""
        seconds = []
        for _ in range(repeats + 2):
            begin = time.perf_counter()
            self.optimizer.step()
            seconds.append(time.perf_counter() - begin)
        return self.numel / statistics.median(seconds[2:])


def orlop_result(bench: str, numel: int, threads: int, repeats: int) -> dict:
    """bench_cpu_adam's default layout: bf16 split master, fp32 moments, bf16 gradient."""
    command = [bench, "--json", "--numel", str(numel), "--threads", str(threads)]
    command += ["--repeats", str(repeats)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def default_threads() -> int:
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return int(asked) if asked else len(os.sched_getaffinity(0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bench", help="bench_cpu_adam; without it only torch is measured")
    parser.add_argument("--numel", type=int, default=64 << 20)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--repeats", type=int, default=7, help="steps of a turn")
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    peer = TorchAdamW(args.numel)
    print(f"torch {torch.__version__}, {args.threads} threads, {args.numel} parameters")
    print("turn | torch G/s  GB/s | Orlop G/s  GB/s  of scale | Orlop / torch")
    ratios = []
    for turn in range(args.turns):
        torch_rate = peer.rate(args.repeats)
        line = f"{turn:4} | {torch_rate / 1e9:9.3f} {torch_rate * BYTES_PER_PARAMETER / 1e9:5.1f}"
        if args.bench:
            orlop = orlop_result(args.bench, args.numel, args.threads, args.repeats)
            rate = orlop["elements_per_s"]
            ratios.append(rate / torch_rate)
            line += f" | {rate / 1e9:9.3f} {rate * orlop['bytes_per_element'] / 1e9:5.1f}"
            line += f" {orlop['of_ceiling']:9.3f} | {ratios[-1]:13.2f}"
        print(line, flush=True)
    if ratios:
        print(f"Orlop / torch: median {statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]")
    return 0


if __name__ == "__main__":
    sys.exit(main())

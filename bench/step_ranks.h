#pragma once

#include "bench/step_setup.h"

namespace orlop::bench {

// `--gpus N`: one step on N ranks, one GPU each, every rank with `--tokens` of its own (a list), in
// three parts: compute alone on one GPU, then N ranks with all optimizer states in device memory,
// then N ranks with all of them in host memory. Prints tokens per second, efficiency (over N times
// the first part's rate), peak bytes, the host's DRAM traffic beside what the memory gives, and
// what each rank's compute waits for, from the traces of all: its own rank (its update and copies),
// the other ranks (a collective has not begun, because one of them has not joined it), and exposed
// communication (all have joined, data moves).
void run_on_ranks(const Options& options);

}  // namespace orlop::bench

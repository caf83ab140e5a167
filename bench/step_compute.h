#pragma once

#include <span>
#include <string>
#include <vector>

#include "bench/support/samples.h"
#include "orlop/config.h"

namespace orlop::bench {

// A step's device work alone, on one device.
struct ComputeTimes {
  double flops = 0;  // of one step, forward and backward
  Summary step;      // forward and backward
  Summary forward;   // of every micro-batch
};

// Weights resident, no update. One result for every number of micro-batches per step, none above
// that of `config`, all on the same memory.
std::vector<ComputeTimes> measure_compute(const std::string& model_dir, EngineConfig config,
                                          int steps, std::span<const int64_t> micro_batches);

}  // namespace orlop::bench

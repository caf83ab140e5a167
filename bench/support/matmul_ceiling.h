#pragma once

#include <span>

#include "backend/ops.h"

namespace orlop::bench {

// What the matmuls of a step take at best on this host.
struct MatmulCeiling {
  double seconds = 0;  // of all of them, one after the other
  double flops = 0;
  int shapes = 0;  // different ones
};

// Times every different shape alone through oneDNN, with operands already in the format that
// oneDNN likes best (blocked, converted: nothing of that is timed), on `threads` threads; median,
// times how often the shape occurs. 16-bit operands are bf16 where the processor multiplies those,
// else fp32, which is faster.
MatmulCeiling measure_matmuls_alone(std::span<const MatmulArgs> matmuls, int threads);

}  // namespace orlop::bench

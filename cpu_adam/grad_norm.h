#pragma once

#include <cstdint>

#include "orlop/types.h"

namespace orlop {

// The fixed order of every square sum in Orlop, equal bit for bit on all instruction sets, thread counts
// and devices. A gradient is cut into chunks of kNormChunk elements. In a chunk, lane j (of kNormLanes)
// sums the squares of the elements i with i % kNormLanes == j in rising order in fp64 (a square of an
// fp32 value is exact in fp64); the lanes are then folded by halves (j += j + 8, then 4, 2, 1). The chunk
// sums are added pairwise level by level: sums[i] = sums[2i] + sums[2i + 1], an odd last one moves up
// unchanged, until one is left.
inline constexpr int64_t kNormChunk = 4096;
inline constexpr int kNormLanes = 16;

struct SquareSum {
  double sum = 0;
  int64_t first_nonfinite = -1;  // index of the first NaN or Inf, or -1
};

// grad (numel) of fp32, bf16 or fp16; scratch of ceil(numel / kNormChunk) doubles.
SquareSum grad_square_sum(const void* grad, DType dtype, int64_t numel, double* scratch, int threads);

}  // namespace orlop

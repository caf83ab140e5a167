#pragma once

#include <cstdint>

#include "cpu_adam/adam_kernel.h"
#include "orlop/cpu_adam.h"

// grad_square_sum (orlop/cpu_adam.h) and the GPU follow one fixed order, equal bit for bit on all
// instruction sets, thread counts and devices. A gradient is cut into chunks of kNormChunk
// elements. In a chunk, lane j (of kNormLanes) sums the squares of the elements i with i %
// kNormLanes == j in rising order in fp64 (a square of an fp32 value is exact in fp64); the lanes
// are then folded by halves (j += j
// + 8, then 4, 2, 1). The chunk sums are added pairwise level by level: sums[i] = sums[2i] +
// sums[2i + 1], an odd last one moves up unchanged, until one is left.
namespace orlop {

static_assert(kNormChunk % kNormLanes == 0);

// The pairwise levels alone, over `count` chunk sums, which are overwritten. 0 for none.
double fold_chunk_sums(double* sums, int64_t count);

// Of a gradient whose chunk sums are in `sums`, which are overwritten.
SquareSum fold_square_sum(const void* grad, GradFormat format, int64_t numel, double* sums);

}  // namespace orlop

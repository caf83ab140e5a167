#pragma once

#include <cstdint>

#include "orlop/export.h"
#include "orlop/types.h"

// The CPU optimizer on its own: one Adam step over flat arrays in host memory, and the norm that
// clipping needs. Everything here gives the same bits for every instruction set, thread count and
// split.
namespace orlop {

// How a shard's states are laid out (all planes have the same numel and do not overlap):
//   bf16 compute: `param` (bf16 hi plane, which is the compute copy) and `lo` (uint16), together
//                 the exact fp32 master:
//                 bits = (hi << 16) + int16(lo),
//                 hi = (bits + 0x8000) >> 16 (round half up)
//                 Who writes `hi` alone leaves a rest of at most half a unit in its last place; a
//                 negative rest beside a zero, which no update leaves, counts as none.
//   fp16 compute: `master` (fp32) and `param` (fp16 copy, round to nearest even)
//   fp32 compute: `master` alone, which is the compute copy
// Planes that a layout does not name are null. Moments are fp32, or bf16 with stochastic rounding
// from a counter-based generator keyed by (seed, step, element index), hence the same for any
// thread count and any split of the shard.
struct AdamShard {
  DType compute_dtype = DType::kBF16;
  DType moment_dtype = DType::kF32;  // kF32 or kBF16
  DType grad_dtype = DType::kBF16;   // kF32, kBF16 or kF16
  void* param = nullptr;
  uint16_t* lo = nullptr;
  float* master = nullptr;
  void* exp_avg = nullptr;
  void* exp_avg_sq = nullptr;
  const void* grad = nullptr;
  int64_t numel = 0;
  int64_t rng_offset = 0;  // index of element 0 within the whole parameter
};

struct AdamHyper {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
  bool decoupled = true;  // AdamW; false: L2 into the gradient (Adam)
  bool maximize = false;
  int64_t step = 1;  // counts from 1
  uint64_t seed = 0;
};

// One Adam step over one shard, in place, on `threads` OpenMP threads; `grad_scale` multiplies
// every gradient first (clip factor / loss scale). A pure function of its arguments: nothing is
// kept between calls. A NaN stays a NaN. Leaves the caller's MXCSR as it was; subnormals are always
// kept. Throws Error(kUsage) before any byte changes for a combination of dtypes, null or
// overlapping planes that the layout above does not have, and for hyperparameters outside their
// range.
ORLOP_EXPORT void adam_step(const AdamShard& shard, const AdamHyper& hyper, float grad_scale,
                            int threads);

struct SquareSum {
  double sum = 0;
  int64_t first_nonfinite = -1;  // index of the first NaN or Inf, or -1
};

// Elements that one double of `scratch` stands for in grad_square_sum.
inline constexpr int64_t kNormChunk = 4096;

// Sum of the squares of grad (numel; fp32, bf16 or fp16) in fp64, in an order that depends on numel
// alone. scratch: ceil(numel / kNormChunk) doubles, overwritten. Throws Error(kUsage).
ORLOP_EXPORT SquareSum grad_square_sum(const void* grad, DType dtype, int64_t numel,
                                       double* scratch, int threads);

// Threads for host work: OMP_NUM_THREADS when it is set, else the physical cores that affinity and
// cgroup leave to this process. Throws Error(kUsage) when OMP_NUM_THREADS is not a number.
ORLOP_EXPORT int default_threads();

}  // namespace orlop

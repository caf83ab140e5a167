#pragma once

#include <cstddef>
#include <cstdint>

#include "orlop/types.h"

namespace orlop {

// How a shard's states are laid out (all planes have the same numel):
//   bf16 compute: `param` (bf16 hi plane, which is the compute copy) and `lo` (uint16): together the exact
//                 fp32 master. bits = (hi << 16) + int16(lo), hi = (bits + 0x8000) >> 16 (round half up).
//   fp16 compute: `master` (fp32) and `param` (fp16 copy, round to nearest even)
//   fp32 compute: `master` alone, which is the compute copy
// Moments are fp32, or bf16 with stochastic rounding from a counter-based generator keyed by (seed, step,
// element index), hence the same for any thread count and any split of the shard.
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

// The fp32 constants of one step, computed once in fp64 and rounded once; shared by every instruction
// set and by the GPU. The formula (Loshchilov & Hutter 2019, in torch.optim.AdamW's order):
//   g  = grad * grad_scale                (negated for maximize; L2: g = fma(l2, p, g))
//   p  = p * decay                        (decoupled)
//   m  = fma(one_minus_beta1, g - m, m)
//   v  = fma(one_minus_beta2 * g, g, beta2 * v)
//   p  = p - step_size * (m / (sqrt(v) / bias_correction2_sqrt + eps))
// with explicit fma where written, correctly rounded division and square root.
struct AdamConstants {
  float grad_scale;
  float decay;
  float l2;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float step_size;
  float bias_correction2_sqrt;
  float eps;
};
AdamConstants adam_constants(const AdamHyper& hyper, float grad_scale);

// One Adam step over one shard, in place, on `threads` OpenMP threads. Bit for bit the same for every
// instruction set, thread count and split of the shard. Leaves the caller's MXCSR as it was.
// Throws Error(kUsage) for a combination of dtypes or null planes that the layout above does not have.
void adam_step(const AdamShard& shard, const AdamHyper& hyper, float grad_scale, int threads);

enum class Isa : uint8_t { kScalar, kAvx2, kAvx512 };
const char* isa_name(Isa isa);
// The widest set that this processor has and ORLOP_MAX_ISA (scalar, avx2, avx512) allows. Read on each
// call so that tests can change the variable.
Isa active_isa();

}  // namespace orlop

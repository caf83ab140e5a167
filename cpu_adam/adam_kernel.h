#pragma once

#include <cstddef>
#include <cstdint>

// What the files of the instruction sets share with the dispatcher: plain data only. They are
// compiled with flags of their own, so no header that they see may hold inline code: a copy of it
// made for AVX-512 could be the one that the linker keeps for everybody.
namespace orlop {

// One step's formula (Loshchilov & Hutter 2019, in torch.optim.AdamW's order), with explicit fma
// where written and correctly rounded division and square root:
//   g  = grad * grad_scale
//   g  = fma(l2, p, g)                      when l2 is not 0
//   p  = p * decay
//   m  = fma(one_minus_beta1, g - m, m)
//   v  = fma(one_minus_beta2 * g, g, beta2 * v)
//   p  = p - step_size * (m / (sqrt(v) / bias_correction2_sqrt + eps))
// m and v enter p unrounded; bf16 moments are rounded when they are stored.
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

// The generator behind stochastic rounding, in 32-bit unsigned arithmetic, for element index i:
//   x = low32(i) ^ first;  x ^= x >> 16;  x *= 0x21f0aaad;
//   x ^= second;           x ^= x >> 15;  x *= 0x735a2d97;  x ^= x >> 15
// The low half of x rounds exp_avg, the high half exp_avg_sq: bf16 = (bits + half) >> 16, a NaN
// becomes 0x7fc0. Two multiplications an element, no state, the same on every device.
struct AdamRngKey {
  uint32_t first;
  uint32_t second;
};

// A contiguous run of a shard whose element indices share their upper 32 bits. Pointers are to the
// run's first element and null where the layout has no such plane.
struct AdamChunk {
  void* param;
  uint16_t* lo;
  float* master;
  void* exp_avg;
  void* exp_avg_sq;
  const void* grad;
  int64_t numel;
  uint32_t index_low;  // low 32 bits of the first element's index
  AdamRngKey key;
};

// Index of each dtype in the tables below.
enum MasterLayout { kSplitBf16, kMasterAndFp16, kMasterAlone, kMasterLayouts };
enum MomentFormat { kMomentF32, kMomentBf16, kMomentFormats };
enum GradFormat { kGradF32, kGradBf16, kGradF16, kGradFormats };

using AdamKernel = void (*)(const AdamChunk& chunk, const AdamConstants& constants);
// Partial sums of the fixed order of square sums (grad_norm.h).
inline constexpr int kNormLanes = 16;

// Sum of squares of one chunk of at most kNormChunk gradients, in the order of grad_norm.h. It is
// finite exactly when every gradient is: the square of the largest fp32 is far from fp64's end.
using SquareSumKernel = double (*)(const void* grad, int64_t numel);

// sum = grad, or sum += grad.
using AccumulateKernel = void (*)(const void* grad, float* sum, int64_t numel);
// grad = sum, rounded to nearest even; a NaN becomes a quiet one.
using RoundKernel = void (*)(const float* sum, void* grad, int64_t numel);

struct CpuKernels {
  AdamKernel adam[kMasterLayouts][kMomentFormats][kGradFormats];
  SquareSumKernel square_sum[kGradFormats];
  AccumulateKernel start_sum[kGradFormats];
  AccumulateKernel add_to_sum[kGradFormats];
  RoundKernel round_sum[kGradFormats];
};

extern const CpuKernels kScalarKernels;
extern const CpuKernels kAvx2Kernels;
extern const CpuKernels kAvx512Kernels;

}  // namespace orlop

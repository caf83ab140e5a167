#include "cpu_adam/adam.h"

#include <algorithm>
#include <type_traits>

#include "gpu/kernels/device_math.cuh"
#include "gpu/kernels/kernels.h"

// The update of cpu_adam/adam_kernel.inl.h, bit for bit: every operation is written as the
// intrinsic of one correctly rounded operation, so that the compiler fuses nothing and approximates
// nothing.
namespace orlop::kernels {
namespace {

constexpr int kBlock = 256;
constexpr int kWide = 8;  // elements per thread and turn
constexpr int64_t kIndexBlock = int64_t{1} << 32;

// A run of elements whose indices share their upper 32 bits; pointers are to its first element.
struct Run {
  uint16_t* param;
  uint16_t* lo;
  float* master;
  void* exp_avg;
  void* exp_avg_sq;
  const void* grad;
  const StepScalars* scalars;
  int64_t numel;
  uint32_t index_low;
  AdamRngKey key;
};

// Every NaN becomes one NaN: another payload could round to an infinity or to zero.
__device__ __forceinline__ uint32_t quiet_bits(float x) {
  return isnan(x) ? 0x7fc00000u : __float_as_uint(x);
}

__device__ __forceinline__ uint32_t random_bits(uint32_t index_low, const AdamRngKey& key) {
  uint32_t x = index_low ^ key.first;
  x ^= x >> 16;
  x *= 0x21f0aaadu;
  x ^= key.second;
  x ^= x >> 15;
  x *= 0x735a2d97u;
  x ^= x >> 15;
  return x;
}

__device__ __forceinline__ uint16_t round_stochastically(float moment, uint32_t random_half) {
  return static_cast<uint16_t>((quiet_bits(moment) + random_half) >> 16);
}

__device__ __forceinline__ void update(const AdamConstants& c, float grad_scale, float grad,
                                       float& p, float& m, float& v) {
  float g = __fmul_rn(grad, grad_scale);
  if (c.l2 != 0.0f) g = __fmaf_rn(c.l2, p, g);
  p = __fmul_rn(p, c.decay);
  m = __fmaf_rn(c.one_minus_beta1, __fsub_rn(g, m), m);
  v = __fmaf_rn(__fmul_rn(c.one_minus_beta2, g), g, __fmul_rn(c.beta2, v));
  const float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), c.bias_correction2_sqrt), c.eps);
  p = __fsub_rn(p, __fmul_rn(c.step_size, __fdiv_rn(m, denominator)));
}

template <typename Compute, int N>
__device__ __forceinline__ void load_master(const Run& run, int64_t i, float (&p)[N]) {
  if constexpr (std::is_same_v<Compute, bf16>) {
    uint16_t hi[N], lo[N];
    load(run.param + i, hi);
    load(run.lo + i, lo);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const int magnitude = ((hi[k] & 0x7fff) << 16) + static_cast<int16_t>(lo[k]);
      const uint32_t sign = (hi[k] & 0x8000u) << 16;
      p[k] = __uint_as_float(sign | static_cast<uint32_t>(max(magnitude, 0)));
    }
  } else {
    load(run.master + i, p);
  }
}

template <typename Compute, int N>
__device__ __forceinline__ void store_master(const Run& run, int64_t i, const float (&p)[N]) {
  if constexpr (std::is_same_v<Compute, bf16>) {
    uint16_t hi[N], lo[N];
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const uint32_t bits = quiet_bits(p[k]);
      hi[k] = static_cast<uint16_t>((bits + 0x8000u) >> 16);
      lo[k] = static_cast<uint16_t>(bits);
    }
    store(run.param + i, hi);
    store(run.lo + i, lo);
  } else {
    store(run.master + i, p);
    if constexpr (std::is_same_v<Compute, fp16>) {
      store_float(reinterpret_cast<fp16*>(run.param) + i, p);
    }
  }
}

template <typename Compute, typename Moment, int N>
__global__ void __launch_bounds__(kBlock) adam_kernel(Run run, AdamConstants c) {
  if (run.scalars->skip != 0) return;
  const float grad_scale = run.scalars->grad_scale;
  Moment* exp_avg = static_cast<Moment*>(run.exp_avg);
  Moment* exp_avg_sq = static_cast<Moment*>(run.exp_avg_sq);
  const Compute* grad = static_cast<const Compute*>(run.grad);
  const int64_t step = int64_t{gridDim.x} * kBlock * N;
  for (int64_t i = (int64_t{blockIdx.x} * kBlock + threadIdx.x) * N; i < run.numel; i += step) {
    float p[N], m[N], v[N], g[N];
    load_master<Compute>(run, i, p);
    load_float(exp_avg + i, m);
    load_float(exp_avg_sq + i, v);
    load_float(grad + i, g);
#pragma unroll
    for (int k = 0; k < N; ++k) update(c, grad_scale, g[k], p[k], m[k], v[k]);
    store_master<Compute>(run, i, p);
    if constexpr (std::is_same_v<Moment, float>) {
      store(exp_avg + i, m);
      store(exp_avg_sq + i, v);
    } else {
      uint16_t rounded_m[N], rounded_v[N];
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const uint32_t random = random_bits(
            run.index_low + static_cast<uint32_t>(i) + static_cast<uint32_t>(k), run.key);
        rounded_m[k] = round_stochastically(m[k], random & 0xffffu);
        rounded_v[k] = round_stochastically(v[k], random >> 16);
      }
      store(reinterpret_cast<uint16_t*>(exp_avg) + i, rounded_m);
      store(reinterpret_cast<uint16_t*>(exp_avg_sq) + i, rounded_v);
    }
  }
}

Run advanced(Run run, int64_t elements, const AdamShard& shard) {
  const auto at = [elements](auto* plane, size_t element_bytes) {
    using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(plane)>>,
                                    const char, char>;
    return plane == nullptr
               ? plane
               : reinterpret_cast<decltype(plane)>(reinterpret_cast<Byte*>(plane) +
                                                   elements * static_cast<int64_t>(element_bytes));
  };
  run.param = at(run.param, 2);
  run.lo = at(run.lo, 2);
  run.master = at(run.master, 4);
  run.exp_avg = at(run.exp_avg, dtype_bytes(shard.moment_dtype));
  run.exp_avg_sq = at(run.exp_avg_sq, dtype_bytes(shard.moment_dtype));
  run.grad = at(run.grad, dtype_bytes(shard.compute_dtype));
  return run;
}

template <typename Compute, typename Moment, int N>
void launch(const Run& run, const AdamConstants& constants, cudaStream_t stream) {
  adam_kernel<Compute, Moment, N>
      <<<grid_blocks(run.numel, int64_t{kBlock} * N), kBlock, 0, stream>>>(run, constants);
  ORLOP_CUDA_LAUNCHED("adam_kernel");
}

// Vectors for the multiple of kWide, single elements for the rest.
template <typename Compute, typename Moment>
void launch_run(const Run& run, const AdamConstants& constants, const AdamShard& shard,
                cudaStream_t stream) {
  const bool aligned = is_aligned(run.param, 16) && is_aligned(run.lo, 16) &&
                       is_aligned(run.master, 16) && is_aligned(run.exp_avg, 16) &&
                       is_aligned(run.exp_avg_sq, 16) && is_aligned(run.grad, 16);
  const int64_t wide = aligned ? run.numel / kWide * kWide : 0;
  if (wide > 0) {
    Run head = run;
    head.numel = wide;
    launch<Compute, Moment, kWide>(head, constants, stream);
  }
  if (wide < run.numel) {
    Run tail = advanced(run, wide, shard);
    tail.numel = run.numel - wide;
    tail.index_low = run.index_low + static_cast<uint32_t>(wide);
    launch<Compute, Moment, 1>(tail, constants, stream);
  }
}

}  // namespace

void device_adam(const DeviceAdamArgs& args, const AdamConstants& constants, cudaStream_t stream) {
  const AdamShard& shard = args.shard;
  const Run whole{.param = static_cast<uint16_t*>(shard.param),
                  .lo = shard.lo,
                  .master = shard.master,
                  .exp_avg = shard.exp_avg,
                  .exp_avg_sq = shard.exp_avg_sq,
                  .grad = shard.grad,
                  .scalars = args.scalars,
                  .numel = shard.numel,
                  .index_low = 0,
                  .key = {}};
  for (int64_t begin = 0; begin < shard.numel;) {
    const int64_t index = shard.rng_offset + begin;
    Run run = advanced(whole, begin, shard);
    run.numel = std::min(shard.numel - begin, kIndexBlock - index % kIndexBlock);
    run.index_low = static_cast<uint32_t>(index % kIndexBlock);
    run.key =
        adam_rng_key(args.hyper.seed, args.hyper.step, static_cast<uint32_t>(index / kIndexBlock));
    dispatch_float(shard.compute_dtype, "device_adam", [&]<typename Compute>() {
      if (shard.moment_dtype == DType::kF32) {
        launch_run<Compute, float>(run, constants, shard, stream);
      } else {
        launch_run<Compute, bf16>(run, constants, shard, stream);
      }
    });
    begin += run.numel;
  }
}

}  // namespace orlop::kernels

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "gpu/cuda_check.h"
#include "orlop/error.h"
#include "orlop/types.h"

// Conversions, vector accesses, reductions and launch shapes that the kernels share.
namespace orlop::kernels {

using bf16 = __nv_bfloat16;
using fp16 = __half;

inline constexpr int kWarp = 32;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(fp16 x) { return __half2float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ fp16 from_float<fp16>(float x) {
  return __float2half_rn(x);
}

// Elements of one 16-byte access.
template <typename T>
inline constexpr int kVector = 16 / static_cast<int>(sizeof(T));

template <int kBytes>
struct RawBytes;
template <>
struct RawBytes<16> {
  using Type = uint4;
};
template <>
struct RawBytes<8> {
  using Type = uint2;
};
template <>
struct RawBytes<4> {
  using Type = uint32_t;
};
template <>
struct RawBytes<2> {
  using Type = uint16_t;
};

// N consecutive elements in accesses of at most 16 bytes; `p` is aligned to min(16, N * sizeof(T)).
template <typename T, int N>
__device__ __forceinline__ void load(const T* p, T (&out)[N]) {
  constexpr int kPiece = N * sizeof(T) > 16 ? kVector<T> : N;
  using Raw = typename RawBytes<kPiece * sizeof(T)>::Type;
#pragma unroll
  for (int begin = 0; begin < N; begin += kPiece) {
    const Raw raw = *reinterpret_cast<const Raw*>(p + begin);
    const T* elements = reinterpret_cast<const T*>(&raw);
#pragma unroll
    for (int i = 0; i < kPiece; ++i) out[begin + i] = elements[i];
  }
}
__device__ __forceinline__ uint32_t bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ uint32_t bits_of(bf16 x) { return __bfloat16_as_ushort(x); }
__device__ __forceinline__ uint32_t bits_of(fp16 x) { return __half_as_ushort(x); }
__device__ __forceinline__ uint32_t bits_of(uint16_t x) { return x; }

// The elements go into whole words first: stores of structures of 16-bit elements are split
// otherwise.
template <typename T, int N>
__device__ __forceinline__ void store(T* p, const T (&in)[N]) {
  if constexpr (N == 1) {
    *p = in[0];
  } else {
    constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));
    constexpr int kWords = N / kPerWord;
    static_assert(N % kPerWord == 0 && (kWords <= 2 || kWords % 4 == 0));
    uint32_t words[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      words[i] = bits_of(in[i * kPerWord]);
      if constexpr (kPerWord == 2) words[i] |= bits_of(in[i * kPerWord + 1]) << 16;
    }
    if constexpr (kWords == 1) *reinterpret_cast<uint32_t*>(p) = words[0];
    if constexpr (kWords == 2) __stwb(reinterpret_cast<uint2*>(p), make_uint2(words[0], words[1]));
#pragma unroll
    for (int i = 0; i + 4 <= kWords; i += 4) {
      __stwb(reinterpret_cast<uint4*>(p) + i / 4,
             make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]));
    }
  }
}
template <typename T, int N>
__device__ __forceinline__ void load_float(const T* p, float (&out)[N]) {
  T raw[N];
  load(p, raw);
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = to_float(raw[i]);
}
template <typename T, int N>
__device__ __forceinline__ void store_float(T* p, const float (&in)[N]) {
  T raw[N];
#pragma unroll
  for (int i = 0; i < N; ++i) raw[i] = from_float<T>(in[i]);
  store(p, raw);
}

// Sums in a fixed order over the lanes of a warp; every lane gets the sum.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, offset);
  }
  return x;
}

// Sum over kThreads threads (a power of two, at least a warp) that call together; all get it. With
// one warp no shared memory is touched. `shared` holds kThreads / 32 floats and is free again on
// return.
template <int kThreads>
__device__ __forceinline__ float team_sum(float x, float* shared) {
  x = warp_sum(x);
  if constexpr (kThreads > kWarp) {
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    if (threadIdx.x % kWarp == 0) shared[warp] = x;
    __syncthreads();
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kThreads / kWarp; ++i) sum += shared[i];
    __syncthreads();
    return sum;
  }
  return x;
}

inline bool is_aligned(const void* p, size_t bytes) {
  return reinterpret_cast<uintptr_t>(p) % bytes == 0;
}

// Blocks for `items` of `per_block` each; kernels stride over the grid for what lies beyond the
// cap.
inline unsigned grid_blocks(int64_t items, int64_t per_block, int64_t cap = int64_t{1} << 20) {
  const int64_t blocks = (items + per_block - 1) / per_block;
  return static_cast<unsigned>(std::clamp<int64_t>(blocks, 1, cap));
}

// Calls fn.template operator()<T>() with the C++ type of a floating-point dtype.
template <typename Fn>
void dispatch_float(DType dtype, const char* operation, Fn&& fn) {
  switch (dtype) {
    case DType::kF32:
      return fn.template operator()<float>();
    case DType::kBF16:
      return fn.template operator()<bf16>();
    case DType::kF16:
      return fn.template operator()<fp16>();
    default:
      throw Error(ErrorCode::kUsage, std::string(operation) + ": dtype " +
                                         std::string(dtype_name(dtype)) +
                                         " is not F32, BF16 or F16");
  }
}

}  // namespace orlop::kernels

#include "gpu/kernels/device_math.cuh"
#include "gpu/kernels/kernels.h"

// What gradients become on their way to other ranks, and what is made of them there.
namespace orlop::kernels {
namespace {

constexpr int kBlock = 256;

// Walks over [0, numel) in pieces of N elements; body(i, count) with count == N but for the last.
template <int N, typename Body>
__device__ __forceinline__ void for_each_piece(int64_t numel, Body&& body) {
  const int64_t step = int64_t{gridDim.x} * kBlock * N;
  for (int64_t i = (int64_t{blockIdx.x} * kBlock + threadIdx.x) * N; i < numel; i += step) {
    body(i, i + N <= numel ? int64_t{N} : numel - i);
  }
}

template <typename T, int N>
__global__ void __launch_bounds__(kBlock) narrow_kernel(const float* from, T* to, int64_t numel) {
  for_each_piece<N>(numel, [&](int64_t i, int64_t count) {
    if (count == N) {
      float values[N];
      load_float(from + i, values);
      store_float(to + i, values);
    } else {
      for (int64_t k = i; k < i + count; ++k) to[k] = from_float<T>(from[k]);
    }
  });
}

template <typename T, int N>
__global__ void __launch_bounds__(kBlock)
    sum_rows_kernel(const T* from, float* to, int64_t rows, int64_t numel) {
  for_each_piece<N>(numel, [&](int64_t i, int64_t count) {
    if (count == N) {
      float sum[N];
      load_float(from + i, sum);
      for (int64_t row = 1; row < rows; ++row) {
        float values[N];
        load_float(from + row * numel + i, values);
#pragma unroll
        for (int k = 0; k < N; ++k) sum[k] = __fadd_rn(sum[k], values[k]);
      }
      store_float(to + i, sum);
    } else {
      for (int64_t k = i; k < i + count; ++k) {
        float sum = to_float(from[k]);
        for (int64_t row = 1; row < rows; ++row) {
          sum = __fadd_rn(sum, to_float(from[row * numel + k]));
        }
        to[k] = sum;
      }
    }
  });
}

}  // namespace

void narrow(const float* from, void* to, int64_t numel, DType dtype, cudaStream_t stream) {
  if (numel == 0) return;
  dispatch_float(dtype, "narrow", [&]<typename T>() {
    constexpr int kWide = kVector<T>;
    T* out = static_cast<T*>(to);
    if (is_aligned(from, 16) && is_aligned(to, 16)) {
      narrow_kernel<T, kWide>
          <<<grid_blocks(numel, int64_t{kBlock} * kWide), kBlock, 0, stream>>>(from, out, numel);
    } else {
      narrow_kernel<T, 1><<<grid_blocks(numel, kBlock), kBlock, 0, stream>>>(from, out, numel);
    }
    ORLOP_CUDA_LAUNCHED("narrow_kernel");
  });
}

void sum_rows(const void* from, float* to, int64_t rows, int64_t numel, DType dtype,
              cudaStream_t stream) {
  if (numel == 0 || rows == 0) return;
  dispatch_float(dtype, "sum_rows", [&]<typename T>() {
    constexpr int kWide = kVector<T>;
    const T* in = static_cast<const T*>(from);
    if (numel % kWide == 0 && is_aligned(from, 16) && is_aligned(to, 16)) {
      sum_rows_kernel<T, kWide>
          <<<grid_blocks(numel, int64_t{kBlock} * kWide), kBlock, 0, stream>>>(in, to, rows, numel);
    } else {
      sum_rows_kernel<T, 1><<<grid_blocks(numel, kBlock), kBlock, 0, stream>>>(in, to, rows, numel);
    }
    ORLOP_CUDA_LAUNCHED("sum_rows_kernel");
  });
}

}  // namespace orlop::kernels

#include "gpu/kernels/device_math.cuh"
#include "gpu/kernels/kernels.h"

namespace orlop::kernels {
namespace {

constexpr int kBlock = 512;
constexpr int kWarps = kBlock / kWarp;

// A running maximum and the sum of exp(x - maximum) below it.
struct SoftmaxSum {
  float maximum;
  float sum;
};

__device__ __forceinline__ SoftmaxSum merge(SoftmaxSum a, SoftmaxSum b) {
  const float maximum = fmaxf(a.maximum, b.maximum);
  // Equal infinities must not give NaN: an empty part has maximum -inf and sum 0.
  const float scale_a = a.maximum == maximum ? 1.0f : expf(a.maximum - maximum);
  const float scale_b = b.maximum == maximum ? 1.0f : expf(b.maximum - maximum);
  return {maximum, a.sum * scale_a + b.sum * scale_b};
}

// In a fixed order over the block; every thread gets the result.
__device__ __forceinline__ SoftmaxSum block_merge(SoftmaxSum x, SoftmaxSum* shared) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const SoftmaxSum other = {__shfl_xor_sync(0xffffffffu, x.maximum, offset),
                              __shfl_xor_sync(0xffffffffu, x.sum, offset)};
    x = merge(x, other);
  }
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = x;
  __syncthreads();
  SoftmaxSum all = shared[0];
#pragma unroll
  for (int i = 1; i < kWarps; ++i) all = merge(all, shared[i]);
  __syncthreads();
  return all;
}

template <typename T, int N>
__device__ __forceinline__ SoftmaxSum softmax_sum(const T* logits, int64_t vocab) {
  SoftmaxSum running = {__int_as_float(static_cast<int>(0xff800000u)), 0.0f};
  for (int64_t c = int64_t{threadIdx.x} * N; c < vocab; c += kBlock * N) {
    float x[N];
    load_float(logits + c, x);
    float maximum = running.maximum;
#pragma unroll
    for (int i = 0; i < N; ++i) maximum = fmaxf(maximum, x[i]);
    float sum =
        running.maximum == maximum ? running.sum : running.sum * expf(running.maximum - maximum);
#pragma unroll
    for (int i = 0; i < N; ++i) sum += expf(x[i] - maximum);
    running = {maximum, sum};
  }
  return running;
}

// One block per row.
template <typename T, int N>
__global__ void __launch_bounds__(kBlock) cross_entropy_kernel(CrossEntropyArgs args) {
  __shared__ SoftmaxSum shared[kWarps];
  const int64_t vocab = args.vocab;
  const float scale = args.write_gradient ? *args.scale : 0.0f;
  for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
    T* logits = static_cast<T*>(args.logits) + row * vocab;
    const int64_t label = args.labels[row];
    if (label < 0) {
      if (threadIdx.x == 0) args.loss[row] = 0.0f;
      if (args.write_gradient) {
        const float zeros[N] = {};
        for (int64_t c = int64_t{threadIdx.x} * N; c < vocab; c += kBlock * N) {
          store_float(logits + c, zeros);
        }
      }
      continue;
    }
    const SoftmaxSum all = block_merge(softmax_sum<T, N>(logits, vocab), shared);
    if (threadIdx.x == 0) {
      // A label outside the vocabulary gives NaN, which the step reports.
      const float target = label < vocab ? to_float(logits[label]) : __int_as_float(0x7fc00000);
      args.loss[row] = logf(all.sum) + (all.maximum - target);
    }
    if (!args.write_gradient) continue;
    __syncthreads();  // logits[label] has been read
    const float inverse = scale / all.sum;
    for (int64_t c = int64_t{threadIdx.x} * N; c < vocab; c += kBlock * N) {
      float x[N];
      load_float(logits + c, x);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        x[i] = expf(x[i] - all.maximum) * inverse;
        if (c + i == label) x[i] -= scale;
      }
      store_float(logits + c, x);
    }
  }
}

}  // namespace

void cross_entropy(const CrossEntropyArgs& args, cudaStream_t stream) {
  if (args.rows == 0 || args.vocab == 0) return;
  dispatch_float(args.dtype, "cross_entropy", [&]<typename T>() {
    constexpr int kWide = kVector<T>;
    const unsigned blocks = grid_blocks(args.rows, 1);
    if (args.vocab % kWide == 0 && is_aligned(args.logits, 16)) {
      cross_entropy_kernel<T, kWide><<<blocks, kBlock, 0, stream>>>(args);
    } else {
      cross_entropy_kernel<T, 1><<<blocks, kBlock, 0, stream>>>(args);
    }
    ORLOP_CUDA_LAUNCHED("cross_entropy_kernel");
  });
}

}  // namespace orlop::kernels

#include "gpu/kernels/column_sum.cuh"
#include "gpu/kernels/kernels.h"

namespace orlop::kernels {
namespace {

template <typename T>
struct BiasTerms {
  static constexpr int kSums = 1;
  const T* dy;
  int64_t n;

  template <int N>
  __device__ __forceinline__ void operator()(int64_t row, int64_t col, float (&dbias)[N],
                                             float (&)[N]) const {
    float in[N];
    load_float(dy + row * n + col, in);
#pragma unroll
    for (int i = 0; i < N; ++i) dbias[i] += in[i];
  }
};

}  // namespace

size_t bias_backward_workspace_bytes(int64_t m, int64_t n) {
  return column_sum_workspace_bytes(m, n, 1);
}

void bias_backward(const void* dy, float* dbias, int64_t m, int64_t n, DType dtype, void* workspace,
                   cudaStream_t stream) {
  if (m == 0 || n == 0) return;
  dispatch_float(dtype, "bias_backward", [&]<typename T>() {
    const bool vectors = n % kVector<T> == 0 && is_aligned(dy, 16);
    column_sum<kVector<T>>(BiasTerms<T>{static_cast<const T*>(dy), n},
                           {.items = m, .cols = n, .sums = {dbias, nullptr}, .vectors = vectors},
                           workspace, stream);
  });
}

}  // namespace orlop::kernels

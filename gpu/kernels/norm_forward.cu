#include "gpu/kernels/kernels.h"
#include "gpu/kernels/norm_rows.cuh"

namespace orlop::kernels {
namespace {

// Statistics are those of the stored, rounded x, so that a recomputation finds the same.
template <typename T, int N, int kTeam, int kIter, bool kLayerNorm>
__global__ void __launch_bounds__(kNormBlock) norm_forward_kernel(NormArgs args) {
  __shared__ float shared[kNormBlock / kWarp];
  const int64_t cols = args.cols;
  const float inverse_cols = 1.0f / static_cast<float>(cols);
  const T* weight = static_cast<const T*>(args.weight);
  const T* bias = static_cast<const T*>(args.bias);
  const auto for_each = [cols](auto&& body) { for_each_owned<N, kTeam, kIter>(cols, body); };
  const int64_t groups = args.rows * args.groups;
  for (int64_t group = team_first<kTeam>(); group < groups; group += team_step<kTeam>()) {
    const int64_t row = group / args.groups;
    const int64_t in_row = (group - row * args.groups) * cols;
    T* x = static_cast<T*>(args.x) + row * args.x_stride + in_row;
    T* y = static_cast<T*>(args.y) + row * args.y_stride + in_row;
    OwnedValues<T, N, kIter> values(x);
    for_each([&](int i, int64_t c) { values.fetch(i, c); });
    if (args.residual != nullptr) {
      const T* residual = static_cast<const T*>(args.residual) + row * args.x_stride + in_row;
      for_each([&](int i, int64_t c) {
        float sum[N], addend[N];
        T rounded[N];
        values.get(i, c, sum);
        load_float(residual + c, addend);
#pragma unroll
        for (int k = 0; k < N; ++k) {
          rounded[k] = from_float<T>(sum[k] + addend[k]);
          sum[k] = to_float(rounded[k]);
        }
        store(x + c, rounded);
        values.set(i, sum);
      });
    }
    float mean = 0;
    if constexpr (kLayerNorm) {
      float sum = 0;
      for_each([&](int i, int64_t c) {
        float in[N];
        values.get(i, c, in);
#pragma unroll
        for (int k = 0; k < N; ++k) sum += in[k];
      });
      mean = team_sum<kTeam>(sum, shared) * inverse_cols;
    }
    float squares = 0;
    for_each([&](int i, int64_t c) {
      float in[N];
      values.get(i, c, in);
#pragma unroll
      for (int k = 0; k < N; ++k) squares += (in[k] - mean) * (in[k] - mean);
    });
    const float variance = team_sum<kTeam>(squares, shared) * inverse_cols;
    const float rstd = 1.0f / sqrtf(variance + args.eps);
    for_each([&](int i, int64_t c) {
      float in[N], w[N];
      values.get(i, c, in);
      load_float(weight + c, w);
#pragma unroll
      for (int k = 0; k < N; ++k) in[k] = (in[k] - mean) * rstd * w[k];
      if (kLayerNorm && bias != nullptr) {
        float b[N];
        load_float(bias + c, b);
#pragma unroll
        for (int k = 0; k < N; ++k) in[k] += b[k];
      }
      store_float(y + c, in);
    });
    if (team_lane<kTeam>() == 0) {
      args.rstd[group] = rstd;
      if constexpr (kLayerNorm) args.mean[group] = mean;
    }
  }
}

template <typename T, bool kLayerNorm>
void launch(const NormArgs& args, cudaStream_t stream) {
  const bool vectors = strides_allow_vectors<T>(args.cols, args.x_stride, args.y_stride) &&
                       is_aligned(args.x, 16) && is_aligned(args.y, 16) &&
                       is_aligned(args.weight, 16) && is_aligned(args.bias, 16) &&
                       is_aligned(args.residual, 16);
  dispatch_norm<T>(vectors, args.cols, [&]<int N, int kTeam, int kIter>() {
    const unsigned blocks = grid_blocks(args.rows * args.groups, kNormBlock / kTeam);
    norm_forward_kernel<T, N, kTeam, kIter, kLayerNorm><<<blocks, kNormBlock, 0, stream>>>(args);
    ORLOP_CUDA_LAUNCHED("norm_forward_kernel");
  });
}

}  // namespace

void norm_forward(const NormArgs& args, cudaStream_t stream) {
  if (args.rows == 0 || args.groups == 0 || args.cols == 0) return;
  dispatch_float(args.dtype, "norm_forward", [&]<typename T>() {
    if (args.mean != nullptr) return launch<T, true>(args, stream);
    return launch<T, false>(args, stream);
  });
}

}  // namespace orlop::kernels

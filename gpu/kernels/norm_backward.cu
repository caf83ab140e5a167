#include "gpu/kernels/column_sum.cuh"
#include "gpu/kernels/kernels.h"
#include "gpu/kernels/norm_rows.cuh"

// With xhat = (x - mean) * rstd and g = dy * weight:
//   dx = rstd * (g - mean(g * xhat) * xhat [- mean(g) for LayerNorm])
//   dweight = sum of dy * xhat, dbias = sum of dy over all rows and groups
// Where a block keeps its row in registers it sums dweight and dbias of a slice of the rows on the
// way; elsewhere column_sum() reads the rows again, before dx is written, which may lie where dy
// is.
namespace orlop::kernels {
namespace {

// Slices of the fused sums: about what is resident at once, within a bounded workspace.
constexpr int64_t kFusedSlices = 512;
constexpr int64_t kFusedFloats = int64_t{4} << 20;

int64_t fused_slices(int64_t items, int64_t cols, int sums) {
  return std::clamp<int64_t>(std::min(kFusedSlices, kFusedFloats / (cols * sums)), 1, items);
}

template <int kTeam, int kIter>
inline constexpr bool kFused = kTeam == kNormBlock && (kIter > 0);

// partial (sums, gridDim.x, cols): written by the fused instances.
template <typename T, int N, int kTeam, int kIter, bool kLayerNorm>
__global__ void __launch_bounds__(kNormBlock)
    norm_backward_kernel(NormBackwardArgs args, float* partial) {
  __shared__ float shared[kNormBlock / kWarp];
  constexpr bool kSums = kFused<kTeam, kIter>;
  constexpr int kKept = kSums ? kIter : 1;
  const int64_t cols = args.cols;
  const float inverse_cols = 1.0f / static_cast<float>(cols);
  const T* weight = static_cast<const T*>(args.weight);
  const auto for_each = [cols](auto&& body) { for_each_owned<N, kTeam, kIter>(cols, body); };
  const int64_t groups = args.rows * args.groups;
  const int64_t per_slice = (groups + gridDim.x - 1) / gridDim.x;
  const int64_t first = kSums ? blockIdx.x * per_slice : team_first<kTeam>();
  const int64_t end = kSums && first + per_slice < groups ? first + per_slice : groups;
  const int64_t step = kSums ? 1 : team_step<kTeam>();
  float dweight[kKept][N] = {};
  float dbias[kKept][N] = {};
  for (int64_t group = first; group < end; group += step) {
    const int64_t row = group / args.groups;
    const int64_t in_row = (group - row * args.groups) * cols;
    T* dx = static_cast<T*>(args.dx) + row * args.x_stride + in_row;
    const float rstd = args.rstd[group];
    const float mean = kLayerNorm ? args.mean[group] : 0.0f;
    OwnedValues<T, N, kIter> x(static_cast<const T*>(args.x) + row * args.x_stride + in_row);
    OwnedValues<T, N, kIter> dy(static_cast<const T*>(args.dy) + row * args.y_stride + in_row);
    for_each([&](int i, int64_t c) {
      x.fetch(i, c);
      dy.fetch(i, c);
    });
    float g_sum = 0, gx_sum = 0;
    for_each([&](int i, int64_t c) {
      float x_in[N], dy_in[N], w[N];
      x.get(i, c, x_in);
      dy.get(i, c, dy_in);
      load_float(weight + c, w);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const float xhat = (x_in[k] - mean) * rstd;
        const float g = dy_in[k] * w[k];
        g_sum += g;
        gx_sum += g * xhat;
        if constexpr (kSums) {
          dweight[i][k] += dy_in[k] * xhat;
          if constexpr (kLayerNorm) dbias[i][k] += dy_in[k];
        }
      }
    });
    const float gx_mean = team_sum<kTeam>(gx_sum, shared) * inverse_cols;
    const float g_mean = kLayerNorm ? team_sum<kTeam>(g_sum, shared) * inverse_cols : 0.0f;
    for_each([&](int i, int64_t c) {
      float x_in[N], dy_in[N], w[N], out[N];
      x.get(i, c, x_in);
      dy.get(i, c, dy_in);
      load_float(weight + c, w);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        const float xhat = (x_in[k] - mean) * rstd;
        out[k] = rstd * (dy_in[k] * w[k] - g_mean - xhat * gx_mean);
      }
      if (args.accumulate_dx) {
        float before[N];
        load_float(dx + c, before);
#pragma unroll
        for (int k = 0; k < N; ++k) out[k] += before[k];
      }
      store_float(dx + c, out);
    });
  }
  if constexpr (kSums) {
    if (partial == nullptr) return;
    for_each([&](int i, int64_t c) {
      store(partial + blockIdx.x * cols + c, dweight[i]);
      if constexpr (kLayerNorm) store(partial + (gridDim.x + blockIdx.x) * cols + c, dbias[i]);
    });
  }
}

// Terms of the sums for column_sum().
template <typename T, bool kLayerNorm>
struct NormWeightTerms {
  static constexpr int kSums = kLayerNorm ? 2 : 1;
  NormBackwardArgs args;

  template <int N>
  __device__ __forceinline__ void operator()(int64_t group, int64_t col, float (&dweight)[N],
                                             float (&dbias)[N]) const {
    const int64_t row = group / args.groups;
    const int64_t in_row = (group - row * args.groups) * args.cols + col;
    float x[N], dy[N];
    load_float(static_cast<const T*>(args.x) + row * args.x_stride + in_row, x);
    load_float(static_cast<const T*>(args.dy) + row * args.y_stride + in_row, dy);
    const float rstd = args.rstd[group];
    const float mean = kLayerNorm ? args.mean[group] : 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      dweight[i] += dy[i] * ((x[i] - mean) * rstd);
      dbias[i] += dy[i];
    }
  }
};

template <typename T, bool kLayerNorm>
void launch(const NormBackwardArgs& args, void* workspace, cudaStream_t stream) {
  const bool vectors = strides_allow_vectors<T>(args.cols, args.x_stride, args.y_stride) &&
                       is_aligned(args.x, 16) && is_aligned(args.dy, 16) &&
                       is_aligned(args.dx, 16) && is_aligned(args.weight, 16);
  const int64_t items = args.rows * args.groups;
  const ColumnSumArgs sums{
      .items = items, .cols = args.cols, .sums = {args.dweight, args.dbias}, .vectors = vectors};
  const bool wanted = args.dweight != nullptr || args.dbias != nullptr;
  dispatch_norm<T>(vectors, args.cols, [&]<int N, int kTeam, int kIter>() {
    float* partial = nullptr;
    unsigned blocks = grid_blocks(items, kNormBlock / kTeam);
    if constexpr (kFused<kTeam, kIter>) {
      blocks = static_cast<unsigned>(fused_slices(items, args.cols, kLayerNorm ? 2 : 1));
      if (wanted) partial = static_cast<float*>(workspace);
    } else if (wanted) {
      column_sum<kVector<T>>(NormWeightTerms<T, kLayerNorm>{args}, sums, workspace, stream);
    }
    norm_backward_kernel<T, N, kTeam, kIter, kLayerNorm>
        <<<blocks, kNormBlock, 0, stream>>>(args, partial);
    ORLOP_CUDA_LAUNCHED("norm_backward_kernel");
    if (partial != nullptr) finish_column_sums<kLayerNorm ? 2 : 1>(partial, blocks, sums, stream);
  });
}

}  // namespace

size_t norm_backward_workspace_bytes(const NormBackwardArgs& args) {
  const int64_t items = args.rows * args.groups;
  const int sums = args.mean != nullptr ? 2 : 1;
  if (items == 0 || args.cols == 0) return 0;
  const int64_t fused = fused_slices(items, args.cols, sums) * args.cols * sums;
  return std::max(static_cast<size_t>(fused) * sizeof(float),
                  column_sum_workspace_bytes(items, args.cols, sums));
}

void norm_backward(const NormBackwardArgs& args, void* workspace, cudaStream_t stream) {
  if (args.rows == 0 || args.groups == 0 || args.cols == 0) return;
  dispatch_float(args.dtype, "norm_backward", [&]<typename T>() {
    if (args.mean != nullptr) return launch<T, true>(args, workspace, stream);
    return launch<T, false>(args, workspace, stream);
  });
}

}  // namespace orlop::kernels

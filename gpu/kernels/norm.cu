#include "gpu/kernels/column_sum.cuh"
#include "gpu/kernels/device_math.cuh"
#include "gpu/kernels/kernels.h"

// RMSNorm and LayerNorm. A team of kTeam threads (one warp for short groups, a block of 256 for
// long ones) handles one group of one row. Every pass reads the row again: it is in the first-level
// cache.
namespace orlop::kernels {
namespace {

constexpr int kBlock = 256;
// Groups up to this length are handled by one warp each.
constexpr int64_t kWarpCols = 512;

// Where team member `lane` of a grid-striding team works.
template <int kTeam>
struct Team {
  int lane;
  int64_t first;
  int64_t step;

  __device__ __forceinline__ Team()
      : lane(static_cast<int>(threadIdx.x) % kTeam),
        first(int64_t{blockIdx.x} * (kBlock / kTeam) + threadIdx.x / kTeam),
        step(int64_t{gridDim.x} * (kBlock / kTeam)) {}
};

// Sum of value(x) over a row of the team's group.
template <int kTeam, int N, typename T, typename Value>
__device__ __forceinline__ float row_sum(const T* x, int64_t cols, int lane, float* shared,
                                         Value&& value) {
  float sum = 0;
  for (int64_t c = int64_t{lane} * N; c < cols; c += int64_t{kTeam} * N) {
    float in[N];
    load_float(x + c, in);
#pragma unroll
    for (int i = 0; i < N; ++i) sum += value(in[i]);
  }
  return team_sum<kTeam>(sum, shared);
}

template <typename T, int N, int kTeam, bool kLayerNorm>
__global__ void __launch_bounds__(kBlock) norm_forward_kernel(NormArgs args) {
  __shared__ float shared[kBlock / kWarp];
  const Team<kTeam> team;
  const int64_t cols = args.cols;
  const float inverse_cols = 1.0f / static_cast<float>(cols);
  const T* weight = static_cast<const T*>(args.weight);
  const T* bias = static_cast<const T*>(args.bias);
  for (int64_t group = team.first; group < args.rows * args.groups; group += team.step) {
    const int64_t row = group / args.groups;
    const int64_t in_row = (group - row * args.groups) * cols;
    T* x = static_cast<T*>(args.x) + row * args.x_stride + in_row;
    T* y = static_cast<T*>(args.y) + row * args.y_stride + in_row;
    if (args.residual != nullptr) {
      const T* residual = static_cast<const T*>(args.residual) + row * args.x_stride + in_row;
      for (int64_t c = int64_t{team.lane} * N; c < cols; c += int64_t{kTeam} * N) {
        float a[N], b[N];
        load_float(x + c, a);
        load_float(residual + c, b);
#pragma unroll
        for (int i = 0; i < N; ++i) a[i] += b[i];
        store_float(x + c, a);
      }
    }
    float mean = 0;
    if constexpr (kLayerNorm) {
      mean =
          row_sum<kTeam, N>(x, cols, team.lane, shared, [](float v) { return v; }) * inverse_cols;
    }
    const float variance = row_sum<kTeam, N>(x, cols, team.lane, shared,
                                             [mean](float v) {
                                               const float centred = kLayerNorm ? v - mean : v;
                                               return centred * centred;
                                             }) *
                           inverse_cols;
    const float rstd = 1.0f / sqrtf(variance + args.eps);
    for (int64_t c = int64_t{team.lane} * N; c < cols; c += int64_t{kTeam} * N) {
      float in[N], w[N], out[N];
      load_float(x + c, in);
      load_float(weight + c, w);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        out[i] = (kLayerNorm ? in[i] - mean : in[i]) * rstd * w[i];
      }
      if constexpr (kLayerNorm) {
        if (bias != nullptr) {
          float b[N];
          load_float(bias + c, b);
#pragma unroll
          for (int i = 0; i < N; ++i) out[i] += b[i];
        }
      }
      store_float(y + c, out);
    }
    if (team.lane == 0) {
      args.rstd[group] = rstd;
      if constexpr (kLayerNorm) args.mean[group] = mean;
    }
  }
}

// With xhat = (x - mean) * rstd and g = dy * weight:
//   dx = rstd * (g - mean(g * xhat) * xhat [- mean(g) for LayerNorm])
// A thread reads its elements of dy before it writes them to dx, so that the two may alias.
template <typename T, int N, int kTeam, bool kLayerNorm>
__global__ void __launch_bounds__(kBlock) norm_backward_kernel(NormBackwardArgs args) {
  __shared__ float shared[kBlock / kWarp];
  const Team<kTeam> team;
  const int64_t cols = args.cols;
  const float inverse_cols = 1.0f / static_cast<float>(cols);
  const T* weight = static_cast<const T*>(args.weight);
  for (int64_t group = team.first; group < args.rows * args.groups; group += team.step) {
    const int64_t row = group / args.groups;
    const int64_t in_row = (group - row * args.groups) * cols;
    const T* x = static_cast<const T*>(args.x) + row * args.x_stride + in_row;
    const T* dy = static_cast<const T*>(args.dy) + row * args.y_stride + in_row;
    T* dx = static_cast<T*>(args.dx) + row * args.x_stride + in_row;
    const float rstd = args.rstd[group];
    const float mean = kLayerNorm ? args.mean[group] : 0.0f;
    float g_sum = 0, gx_sum = 0;
    for (int64_t c = int64_t{team.lane} * N; c < cols; c += int64_t{kTeam} * N) {
      float x_in[N], dy_in[N], w[N];
      load_float(x + c, x_in);
      load_float(dy + c, dy_in);
      load_float(weight + c, w);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float g = dy_in[i] * w[i];
        g_sum += g;
        gx_sum += g * ((x_in[i] - mean) * rstd);
      }
    }
    const float gx_mean = team_sum<kTeam>(gx_sum, shared) * inverse_cols;
    const float g_mean = kLayerNorm ? team_sum<kTeam>(g_sum, shared) * inverse_cols : 0.0f;
    for (int64_t c = int64_t{team.lane} * N; c < cols; c += int64_t{kTeam} * N) {
      float x_in[N], dy_in[N], w[N], out[N];
      load_float(x + c, x_in);
      load_float(dy + c, dy_in);
      load_float(weight + c, w);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float xhat = (x_in[i] - mean) * rstd;
        out[i] = rstd * (dy_in[i] * w[i] - g_mean - xhat * gx_mean);
      }
      if (args.accumulate_dx) {
        float before[N];
        load_float(dx + c, before);
#pragma unroll
        for (int i = 0; i < N; ++i) out[i] += before[i];
      }
      store_float(dx + c, out);
    }
  }
}

// Terms of dweight = sum of dy * xhat and dbias = sum of dy, for column_sum().
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

template <typename T>
bool strides_allow_vectors(int64_t cols, int64_t x_stride, int64_t y_stride) {
  return cols % kVector<T> == 0 && x_stride % kVector<T> == 0 && y_stride % kVector<T> == 0;
}

// Calls launch.template operator()<N, kTeam>().
template <typename T, typename Launch>
void choose_team(bool vectors, int64_t cols, Launch&& launch) {
  const bool warp = cols <= kWarpCols;
  if (vectors && warp) return launch.template operator()<kVector<T>, kWarp>();
  if (vectors) return launch.template operator()<kVector<T>, kBlock>();
  if (warp) return launch.template operator()<1, kWarp>();
  return launch.template operator()<1, kBlock>();
}

template <typename T, bool kLayerNorm>
void launch_forward(const NormArgs& args, cudaStream_t stream) {
  const bool vectors = strides_allow_vectors<T>(args.cols, args.x_stride, args.y_stride) &&
                       is_aligned(args.x, 16) && is_aligned(args.y, 16) &&
                       is_aligned(args.weight, 16) && is_aligned(args.bias, 16) &&
                       is_aligned(args.residual, 16);
  choose_team<T>(vectors, args.cols, [&]<int N, int kTeam>() {
    const unsigned blocks = grid_blocks(args.rows * args.groups, kBlock / kTeam);
    norm_forward_kernel<T, N, kTeam, kLayerNorm><<<blocks, kBlock, 0, stream>>>(args);
    ORLOP_CUDA_LAUNCHED("norm_forward_kernel");
  });
}

template <typename T, bool kLayerNorm>
void launch_backward(const NormBackwardArgs& args, void* workspace, cudaStream_t stream) {
  const bool vectors = strides_allow_vectors<T>(args.cols, args.x_stride, args.y_stride) &&
                       is_aligned(args.x, 16) && is_aligned(args.dy, 16) &&
                       is_aligned(args.dx, 16) && is_aligned(args.weight, 16);
  // First the sums: dx may lie where dy is.
  if (args.dweight != nullptr) {
    column_sum<kVector<T>>(NormWeightTerms<T, kLayerNorm>{args},
                           {.items = args.rows * args.groups,
                            .cols = args.cols,
                            .sums = {args.dweight, args.dbias},
                            .vectors = vectors},
                           workspace, stream);
  }
  choose_team<T>(vectors, args.cols, [&]<int N, int kTeam>() {
    const unsigned blocks = grid_blocks(args.rows * args.groups, kBlock / kTeam);
    norm_backward_kernel<T, N, kTeam, kLayerNorm><<<blocks, kBlock, 0, stream>>>(args);
    ORLOP_CUDA_LAUNCHED("norm_backward_kernel");
  });
}

}  // namespace

void norm_forward(const NormArgs& args, cudaStream_t stream) {
  if (args.rows == 0 || args.groups == 0 || args.cols == 0) return;
  dispatch_float(args.dtype, "norm_forward", [&]<typename T>() {
    if (args.mean != nullptr) return launch_forward<T, true>(args, stream);
    return launch_forward<T, false>(args, stream);
  });
}

size_t norm_backward_workspace_bytes(const NormBackwardArgs& args) {
  return column_sum_workspace_bytes(args.rows * args.groups, args.cols,
                                    args.mean != nullptr ? 2 : 1);
}

void norm_backward(const NormBackwardArgs& args, void* workspace, cudaStream_t stream) {
  if (args.rows == 0 || args.groups == 0 || args.cols == 0) return;
  dispatch_float(args.dtype, "norm_backward", [&]<typename T>() {
    if (args.mean != nullptr) return launch_backward<T, true>(args, workspace, stream);
    return launch_backward<T, false>(args, workspace, stream);
  });
}

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

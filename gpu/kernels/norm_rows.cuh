#pragma once

#include "gpu/kernels/device_math.cuh"

// What RMSNorm and LayerNorm share. A team of kTeam threads (one warp for short groups, a block for
// long ones) handles one group of one row. Thread `lane` owns the elements [c, c + N) with c = (i *
// kTeam + lane) * N; where kIter > 0 its values stay in registers, at most kIter times N of them,
// else every pass reads the row again.
namespace orlop::kernels {

inline constexpr int kNormBlock = 256;
// Groups up to this length are handled by one warp each.
inline constexpr int64_t kWarpCols = 512;

template <int kTeam>
__device__ __forceinline__ int team_lane() {
  return static_cast<int>(threadIdx.x) % kTeam;
}
// First group of the team, in a grid that strides over groups by team_step().
template <int kTeam>
__device__ __forceinline__ int64_t team_first() {
  return int64_t{blockIdx.x} * (kNormBlock / kTeam) + threadIdx.x / kTeam;
}
template <int kTeam>
__device__ __forceinline__ int64_t team_step() {
  return int64_t{gridDim.x} * (kNormBlock / kTeam);
}

// Calls body(i, c) for every piece of N elements that the thread owns; i is a constant when kIter >
// 0.
template <int N, int kTeam, int kIter, typename Body>
__device__ __forceinline__ void for_each_owned(int64_t cols, Body&& body) {
  if constexpr (kIter > 0) {
#pragma unroll
    for (int i = 0; i < kIter; ++i) {
      const int64_t c = int64_t{i * kTeam + team_lane<kTeam>()} * N;
      if (c < cols) body(i, c);
    }
  } else {
    for (int64_t c = int64_t{team_lane<kTeam>()} * N; c < cols; c += int64_t{kTeam} * N) body(0, c);
  }
}

// Values of the owned elements of a row, kept or read again.
template <typename T, int N, int kIter>
class OwnedValues {
 public:
  __device__ __forceinline__ explicit OwnedValues(const T* row) : row_(row) {}

  // Once per piece, before get().
  __device__ __forceinline__ void fetch(int i, int64_t c) {
    if constexpr (kIter > 0) load_float(row_ + c, kept_[i]);
  }
  __device__ __forceinline__ void set(int i, const float (&values)[N]) {
    if constexpr (kIter > 0) {
#pragma unroll
      for (int k = 0; k < N; ++k) kept_[i][k] = values[k];
    }
  }
  __device__ __forceinline__ void get(int i, int64_t c, float (&values)[N]) const {
    if constexpr (kIter > 0) {
#pragma unroll
      for (int k = 0; k < N; ++k) values[k] = kept_[i][k];
    } else {
      load_float(row_ + c, values);
    }
  }

 private:
  const T* row_;
  float kept_[kIter > 0 ? kIter : 1][N];
};

// The instance of a kernel for a shape: launch.template operator()<N, kTeam, kIter>().
template <typename T, typename Launch>
void dispatch_norm(bool vectors, int64_t cols, Launch&& launch) {
  constexpr int kWide = kVector<T>;
  constexpr int64_t kBlockWidth = int64_t{kNormBlock} * kWide;
  if (!vectors) {
    if (cols <= kWarpCols) return launch.template operator()<1, kWarp, 0>();
    return launch.template operator()<1, kNormBlock, 0>();
  }
  if (cols <= 2 * kWarp * kWide) return launch.template operator()<kWide, kWarp, 2>();
  if (cols <= 2 * kBlockWidth) return launch.template operator()<kWide, kNormBlock, 2>();
  if (cols <= 4 * kBlockWidth) return launch.template operator()<kWide, kNormBlock, 4>();
  return launch.template operator()<kWide, kNormBlock, 0>();
}

template <typename T>
bool strides_allow_vectors(int64_t cols, int64_t x_stride, int64_t y_stride) {
  return cols % kVector<T> == 0 && x_stride % kVector<T> == 0 && y_stride % kVector<T> == 0;
}

}  // namespace orlop::kernels

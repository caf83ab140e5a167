#include "base/bytes.h"
#include "gpu/kernels/device_math.cuh"
#include "gpu/kernels/kernels.h"

namespace orlop::kernels {
namespace {

constexpr int kTile = 32;
constexpr int kRows = 8;  // threads below each other; each owns kTile / kRows rows of the tile
constexpr int kOwned = kTile / kRows;

// Element (row, col) of op(x), whose stored rows are `ld` apart; zero outside (rows, cols).
template <typename In>
__device__ __forceinline__ float element(const In* x, int64_t row, int64_t col, int64_t rows,
                                         int64_t cols, int64_t ld, bool transposed) {
  if (row >= rows || col >= cols) return 0.0f;
  return to_float(transposed ? x[col * ld + row] : x[row * ld + col]);
}

template <typename In, typename Out>
__global__ void __launch_bounds__(kTile* kRows) plain_matmul_kernel(MatmulArgs args) {
  __shared__ float a_tile[kTile][kTile + 1];
  __shared__ float b_tile[kTile][kTile + 1];
  const In* a = static_cast<const In*>(args.a);
  const In* b = static_cast<const In*>(args.b);
  const int x = static_cast<int>(threadIdx.x);
  const int y = static_cast<int>(threadIdx.y);
  const int64_t tiles_n = (args.n + kTile - 1) / kTile;
  const int64_t tiles = tiles_n * ((args.m + kTile - 1) / kTile);
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t row0 = tile / tiles_n * kTile;
    const int64_t col0 = tile % tiles_n * kTile;
    float sums[kOwned] = {};
    for (int64_t k0 = 0; k0 < args.k; k0 += kTile) {
#pragma unroll
      for (int r = 0; r < kOwned; ++r) {
        const int line = y + r * kRows;
        a_tile[line][x] = element(a, row0 + line, k0 + x, args.m, args.k, args.lda, args.trans_a);
        b_tile[line][x] = element(b, k0 + line, col0 + x, args.k, args.n, args.ldb, args.trans_b);
      }
      __syncthreads();
      for (int k = 0; k < kTile; ++k) {
#pragma unroll
        for (int r = 0; r < kOwned; ++r) sums[r] += a_tile[y + r * kRows][k] * b_tile[k][x];
      }
      __syncthreads();
    }
    const int64_t col = col0 + x;
    if (col >= args.n) continue;
    const float bias =
        args.bias != nullptr ? to_float(static_cast<const In*>(args.bias)[col]) : 0.0f;
#pragma unroll
    for (int r = 0; r < kOwned; ++r) {
      const int64_t row = row0 + y + r * kRows;
      if (row >= args.m) continue;
      Out* c = static_cast<Out*>(args.c) + row * args.ldc + col;
      const float before = args.accumulate ? to_float(*c) : 0.0f;
      *c = from_float<Out>(before + (sums[r] + bias));
    }
  }
}

template <typename In, typename Out>
__global__ void __launch_bounds__(256) add_bias_kernel(MatmulArgs args) {
  Out* c = static_cast<Out*>(args.c);
  const In* bias = static_cast<const In*>(args.bias);
  for (int64_t row = blockIdx.x; row < args.m; row += gridDim.x) {
    for (int64_t col = threadIdx.x; col < args.n; col += blockDim.x) {
      Out* at = c + row * args.ldc + col;
      *at = from_float<Out>(to_float(*at) + to_float(bias[col]));
    }
  }
}

// Calls launch.template operator()<In, Out>().
template <typename Launch>
void dispatch_matmul(const MatmulArgs& args, Launch&& launch) {
  dispatch_float(args.in_dtype, "matmul", [&]<typename In>() {
    dispatch_float(args.out_dtype, "matmul",
                   [&]<typename Out>() { launch.template operator()<In, Out>(); });
  });
}

}  // namespace

void plain_matmul(const MatmulArgs& args, cudaStream_t stream) {
  if (args.m == 0 || args.n == 0) return;
  const int64_t tiles = ceil_div(args.m, kTile) * ceil_div(args.n, kTile);
  dispatch_matmul(args, [&]<typename In, typename Out>() {
    plain_matmul_kernel<In, Out><<<grid_blocks(tiles, 1), dim3(kTile, kRows), 0, stream>>>(args);
    ORLOP_CUDA_LAUNCHED("plain_matmul_kernel");
  });
}

void add_bias(const MatmulArgs& args, cudaStream_t stream) {
  if (args.m == 0 || args.n == 0) return;
  dispatch_matmul(args, [&]<typename In, typename Out>() {
    add_bias_kernel<In, Out><<<grid_blocks(args.m, 1), 256, 0, stream>>>(args);
    ORLOP_CUDA_LAUNCHED("add_bias_kernel");
  });
}

}  // namespace orlop::kernels

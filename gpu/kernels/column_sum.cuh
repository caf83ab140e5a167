#pragma once

#include "base/bytes.h"
#include "gpu/kernels/device_math.cuh"

// Sums over many rows for every column, in an order that depends on the shape alone: rows are cut
// into slices; a block sums a tile of columns of one slice, then a second kernel adds the slices in
// order.
namespace orlop::kernels {

inline constexpr int kColumnLanes = 32;         // threads side by side over columns
inline constexpr int kColumnRows = 8;           // threads below each other over rows
inline constexpr int64_t kColumnBlocks = 1024;  // wanted in all
inline constexpr int64_t kMinSliceRows = 64;

struct ColumnSumArgs {
  int64_t items = 0;  // rows to sum over
  int64_t cols = 0;
  float* sums[2] = {nullptr, nullptr};  // (cols) fp32, added to; the second may be null
  bool vectors = false;                 // every row is aligned for 16-byte accesses
};

// Slices of the rows: enough blocks to fill the device, and never so many that a slice is short.
// Tiles are counted alike for both kinds of access, so that both give one order.
inline int64_t column_slices(int64_t items, int64_t cols) {
  const int64_t tiles = ceil_div(cols, kColumnLanes * 4);
  return std::clamp<int64_t>(kColumnBlocks / std::max<int64_t>(tiles, 1), 1,
                             ceil_div(items, kMinSliceRows));
}

inline size_t column_sum_workspace_bytes(int64_t items, int64_t cols, int sums) {
  return static_cast<size_t>(column_slices(items, cols) * cols * sums) * sizeof(float);
}

// partial (kSums, slices, cols)
template <typename Terms, int N>
__global__ void __launch_bounds__(kColumnLanes* kColumnRows)
    column_slice_kernel(Terms terms, int64_t items, int64_t cols, float* partial) {
  __shared__ float shared[kColumnRows][kColumnLanes * N + 1];
  const int lane = static_cast<int>(threadIdx.x);
  const int part = static_cast<int>(threadIdx.y);
  const int64_t col = (int64_t{blockIdx.x} * kColumnLanes + lane) * N;
  const int64_t slices = gridDim.y;
  const int64_t slice = blockIdx.y;
  const int64_t per_slice = (items + slices - 1) / slices;
  const int64_t begin = slice * per_slice;
  const int64_t end = begin + per_slice < items ? begin + per_slice : items;
  float sums[2][N] = {};
  if (col < cols) {
    for (int64_t item = begin + part; item < end; item += kColumnRows) {
      terms(item, col, sums[0], sums[1]);
    }
  }
#pragma unroll
  for (int k = 0; k < Terms::kSums; ++k) {
#pragma unroll
    for (int i = 0; i < N; ++i) shared[part][lane * N + i] = sums[k][i];
    __syncthreads();
    // Thread (lane, part) now owns columns part * 32 + lane, + 256, ...: one per 256 of the tile.
    for (int c = part * kColumnLanes + lane; c < kColumnLanes * N;
         c += kColumnLanes * kColumnRows) {
      const int64_t out = int64_t{blockIdx.x} * kColumnLanes * N + c;
      float sum = 0;
#pragma unroll
      for (int r = 0; r < kColumnRows; ++r) sum += shared[r][c];
      if (out < cols) partial[(k * slices + slice) * cols + out] = sum;
    }
    __syncthreads();
  }
}

// sums[col] += partial[0][col] + partial[1][col] + ..., eight interleaved sums folded in order.
static __global__ void __launch_bounds__(kColumnLanes* kColumnRows)
    column_finish_kernel(const float* partial, int64_t slices, int64_t cols, float* sums) {
  __shared__ float shared[kColumnRows][kColumnLanes];
  const int lane = static_cast<int>(threadIdx.x);
  const int part = static_cast<int>(threadIdx.y);
  const int64_t col = int64_t{blockIdx.x} * kColumnLanes + lane;
  float sum = 0;
  if (col < cols) {
    for (int64_t slice = part; slice < slices; slice += kColumnRows) {
      sum += partial[slice * cols + col];
    }
  }
  shared[part][lane] = sum;
  __syncthreads();
  if (part == 0 && col < cols) {
    float total = 0;
#pragma unroll
    for (int r = 0; r < kColumnRows; ++r) total += shared[r][lane];
    sums[col] += total;
  }
}

// Adds the slices of partial (kSums, slices, cols) to args.sums; a null one is dropped.
template <int kSums>
void finish_column_sums(const float* partial, int64_t slices, const ColumnSumArgs& args,
                        cudaStream_t stream) {
  const dim3 block(kColumnLanes, kColumnRows);
  const auto blocks = static_cast<unsigned>(ceil_div(args.cols, kColumnLanes));
  for (int k = 0; k < kSums; ++k) {
    if (args.sums[k] == nullptr) continue;
    column_finish_kernel<<<blocks, block, 0, stream>>>(partial + k * slices * args.cols, slices,
                                                       args.cols, args.sums[k]);
    ORLOP_CUDA_LAUNCHED("column_finish_kernel");
  }
}

// Terms: kSums (1 or 2) and operator()<N>(item, col, first (&)[N], second (&)[N]), which adds the
// terms of N columns from `col` on. kWide columns per thread when args.vectors is set, else one.
// `workspace` holds column_sum_workspace_bytes().
template <int kWide, typename Terms>
void column_sum(const Terms& terms, const ColumnSumArgs& args, void* workspace,
                cudaStream_t stream) {
  auto* partial = static_cast<float*>(workspace);
  const int64_t slices = column_slices(args.items, args.cols);
  const dim3 block(kColumnLanes, kColumnRows);
  const auto grid = [&](int64_t wide) {
    return dim3(static_cast<unsigned>(ceil_div(args.cols, kColumnLanes * wide)),
                static_cast<unsigned>(slices));
  };
  if (args.vectors) {
    column_slice_kernel<Terms, kWide>
        <<<grid(kWide), block, 0, stream>>>(terms, args.items, args.cols, partial);
  } else {
    column_slice_kernel<Terms, 1>
        <<<grid(1), block, 0, stream>>>(terms, args.items, args.cols, partial);
  }
  ORLOP_CUDA_LAUNCHED("column_slice_kernel");
  finish_column_sums<Terms::kSums>(partial, slices, args, stream);
}

}  // namespace orlop::kernels

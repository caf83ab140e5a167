#include "base/bytes.h"
#include "gpu/kernels/device_math.cuh"
#include "gpu/kernels/kernels.h"

namespace orlop::kernels {
namespace {

constexpr int kBlock = 256;
// Rows of a run whose loads are in flight together; they are added one after the other.
constexpr int kRowsInFlight = 4;

// An index outside the table gives NaN, which the non-finite check of the step reports.
template <typename T, int N>
__global__ void __launch_bounds__(kBlock) embedding_forward_kernel(EmbeddingArgs args) {
  const T* table = static_cast<const T*>(args.table);
  const T* positions_table = static_cast<const T*>(args.positions_table);
  T* out = static_cast<T*>(args.out);
  for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
    const int64_t token = args.tokens[row];
    const bool known = token >= 0 && token < args.vocab;
    for (int64_t col = int64_t{threadIdx.x} * N; col < args.cols; col += kBlock * N) {
      float x[N];
      if (known) {
        load_float(table + token * args.cols + col, x);
      } else {
#pragma unroll
        for (int i = 0; i < N; ++i) x[i] = __int_as_float(0x7fc00000);
      }
      if (positions_table != nullptr) {
        float p[N];
        load_float(positions_table + int64_t{args.positions[row]} * args.cols + col, p);
#pragma unroll
        for (int i = 0; i < N; ++i) x[i] += p[i];
      }
      store_float(out + row * args.cols + col, x);
    }
  }
}

// x over columns, y over runs: one thread adds all rows of a run for its columns, in row order.
template <typename T, int N>
__global__ void __launch_bounds__(kBlock) embedding_backward_kernel(EmbeddingBackwardArgs args) {
  const T* dy = static_cast<const T*>(args.dy);
  const int64_t col = (int64_t{blockIdx.x} * kBlock + threadIdx.x) * N;
  if (col >= args.cols) return;
  for (int64_t run = blockIdx.y; run < args.runs; run += gridDim.y) {
    const int64_t end = args.run_begin[run + 1];
    int64_t i = args.run_begin[run];
    float sum[N] = {};
    for (; i + kRowsInFlight <= end; i += kRowsInFlight) {
      float in[kRowsInFlight][N];
#pragma unroll
      for (int k = 0; k < kRowsInFlight; ++k) {
        load_float(dy + int64_t{args.sorted_rows[i + k]} * args.cols + col, in[k]);
      }
#pragma unroll
      for (int k = 0; k < kRowsInFlight; ++k) {
#pragma unroll
        for (int c = 0; c < N; ++c) sum[c] += in[k][c];
      }
    }
    for (; i < end; ++i) {
      float in[N];
      load_float(dy + int64_t{args.sorted_rows[i]} * args.cols + col, in);
#pragma unroll
      for (int c = 0; c < N; ++c) sum[c] += in[c];
    }
    float* out = args.dtable + int64_t{args.run_index[run]} * args.cols + col;
#pragma unroll
    for (int c = 0; c < N; ++c) out[c] += sum[c];
  }
}

}  // namespace

void embedding_forward(const EmbeddingArgs& args, cudaStream_t stream) {
  if (args.rows == 0 || args.cols == 0) return;
  dispatch_float(args.dtype, "embedding_forward", [&]<typename T>() {
    constexpr int kWide = kVector<T>;
    const unsigned blocks = grid_blocks(args.rows, 1);
    const bool vectors = args.cols % kWide == 0 && is_aligned(args.table, 16) &&
                         is_aligned(args.positions_table, 16) && is_aligned(args.out, 16);
    if (vectors) {
      embedding_forward_kernel<T, kWide><<<blocks, kBlock, 0, stream>>>(args);
    } else {
      embedding_forward_kernel<T, 1><<<blocks, kBlock, 0, stream>>>(args);
    }
    ORLOP_CUDA_LAUNCHED("embedding_forward_kernel");
  });
}

void embedding_backward(const EmbeddingBackwardArgs& args, cudaStream_t stream) {
  if (args.runs == 0 || args.cols == 0) return;
  dispatch_float(args.dtype, "embedding_backward", [&]<typename T>() {
    constexpr int kWide = kVector<T>;
    const auto grid = [&](int64_t wide) {
      return dim3(static_cast<unsigned>(ceil_div(args.cols, kBlock * wide)),
                  static_cast<unsigned>(std::min<int64_t>(args.runs, 65535)));
    };
    if (args.cols % kWide == 0 && is_aligned(args.dy, 16)) {
      embedding_backward_kernel<T, kWide><<<grid(kWide), kBlock, 0, stream>>>(args);
    } else {
      embedding_backward_kernel<T, 1><<<grid(1), kBlock, 0, stream>>>(args);
    }
    ORLOP_CUDA_LAUNCHED("embedding_backward_kernel");
  });
}

}  // namespace orlop::kernels

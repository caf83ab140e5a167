#include "base/bytes.h"
#include "gpu/kernels/device_math.cuh"
#include "gpu/kernels/kernels.h"

// Attention by tiles of 32 queries and 32 keys in fp32 (Dao et al. 2022, without tensor cores). A
// warp owns four rows of its block's tile (queries in the forward pass and for dq, keys for dk and
// dv); its lanes are the 32 columns of the other side while scores are made and elements of a head
// while rows are accumulated. Nothing is added by two blocks, so all sums have one order. A tile
// may hold rows of several sequences: every row knows where its own begins and ends.
namespace orlop::kernels {
namespace {

constexpr int kTile = 32;
constexpr int kBlock = 256;
constexpr int kOwned = kTile / (kBlock / kWarp);  // rows of a warp

struct Problem {
  AttentionArgs args;
  int64_t sequences;
};

struct BackwardProblem {
  AttentionArgs args;
  int64_t sequences;
  const void* dout;
  void* dq;
  void* dk;
  void* dv;
  float* delta;  // (heads, rows): sum of dout * out over a head
};

// Index s with cu_seqlens[s] <= row < cu_seqlens[s + 1], for rows inside the batch.
__device__ __forceinline__ int64_t sequence_of(const int32_t* cu_seqlens, int64_t sequences,
                                               int64_t row) {
  int64_t low = 0;
  int64_t high = sequences;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (cu_seqlens[middle] <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// tile[r][d] = x[row0 + r][d] with kPitch floats between rows, zeros outside the batch and the
// head.
template <int kDim, int kPitch, typename T>
__device__ __forceinline__ void load_tile(float* tile, const T* x, int64_t row0, int64_t rows,
                                          int64_t stride, int head_dim) {
  for (int i = static_cast<int>(threadIdx.x); i < kTile * kDim; i += kBlock) {
    const int r = i / kDim;
    const int d = i % kDim;
    const bool inside = row0 + r < rows && d < head_dim;
    tile[r * kPitch + d] = inside ? to_float(x[(row0 + r) * stride + d]) : 0.0f;
  }
}

// dot[r] = owned row r of `rows` (pitch kDim, the same for all lanes) with the lane's row of
// `columns` (pitch kDim + 1: no bank conflicts).
template <int kDim>
__device__ __forceinline__ void dot_rows(const float* rows, const float* columns,
                                         float (&dot)[kOwned]) {
  const float* column = columns + static_cast<int>(threadIdx.x % kWarp) * (kDim + 1);
#pragma unroll
  for (int r = 0; r < kOwned; ++r) dot[r] = 0;
#pragma unroll 8
  for (int d = 0; d < kDim; ++d) {
    const float c = column[d];
#pragma unroll
    for (int r = 0; r < kOwned; ++r) dot[r] += rows[r * kDim + d] * c;
  }
}

// sum[r][j] += over the tile's columns: weight of (owned row r, column) * column[lane + 32 j]. Lane
// c holds the weights of column c.
template <int kDim>
__device__ __forceinline__ void add_weighted(const float (&weight)[kOwned], const float* columns,
                                             float (&sum)[kOwned][kDim / kWarp]) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  for (int c = 0; c < kTile; ++c) {
    float w[kOwned];
#pragma unroll
    for (int r = 0; r < kOwned; ++r) w[r] = __shfl_sync(0xffffffffu, weight[r], c);
#pragma unroll
    for (int j = 0; j < kDim / kWarp; ++j) {
      const float x = columns[c * (kDim + 1) + lane + kWarp * j];
#pragma unroll
      for (int r = 0; r < kOwned; ++r) sum[r][j] += w[r] * x;
    }
  }
}

template <int kDim, typename T>
__device__ __forceinline__ void store_rows(T* x, int64_t row0, int64_t rows, int64_t stride,
                                           int head_dim, const float (&sum)[kOwned][kDim / kWarp]) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
#pragma unroll
  for (int r = 0; r < kOwned; ++r) {
    if (row0 + r >= rows) return;
#pragma unroll
    for (int j = 0; j < kDim / kWarp; ++j) {
      const int d = lane + kWarp * j;
      if (d < head_dim) x[(row0 + r) * stride + d] = from_float<T>(sum[r][j]);
    }
  }
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  }
  return x;
}

// Rows and first keys of the four queries of a warp.
struct OwnedQueries {
  int64_t row0;
  int64_t first_key[kOwned];  // a row outside the batch has none: first_key > row
};

__device__ __forceinline__ OwnedQueries owned_queries(const AttentionArgs& args, int64_t sequences,
                                                      int64_t tile_row) {
  OwnedQueries out;
  out.row0 = tile_row + static_cast<int>(threadIdx.x) / kWarp * kOwned;
#pragma unroll
  for (int r = 0; r < kOwned; ++r) {
    const int64_t row = out.row0 + r;
    out.first_key[r] =
        row < args.rows ? args.cu_seqlens[sequence_of(args.cu_seqlens, sequences, row)] : row + 1;
  }
  return out;
}

// Blocks: x over query tiles, y over heads.
template <typename T, int kDim>
__global__ void __launch_bounds__(kBlock) forward_kernel(Problem problem) {
  extern __shared__ float memory[];
  float* q_tile = memory;                  // (kTile, kDim)
  float* kv_tile = q_tile + kTile * kDim;  // (kTile, kDim + 1), keys and then values
  const AttentionArgs& args = problem.args;
  const int head_dim = static_cast<int>(args.head_dim);
  const int64_t head = blockIdx.y;
  const int64_t kv_offset = head / (args.heads / args.kv_heads) * args.head_dim;
  const int64_t tile_row = int64_t{blockIdx.x} * kTile;
  const int64_t tile_end = tile_row + kTile < args.rows ? tile_row + kTile : args.rows;
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const T* k = static_cast<const T*>(args.k) + kv_offset;
  const T* v = static_cast<const T*>(args.v) + kv_offset;

  load_tile<kDim, kDim>(q_tile, static_cast<const T*>(args.q) + head * args.head_dim, tile_row,
                        args.rows, args.q_stride, head_dim);
  const OwnedQueries own = owned_queries(args, problem.sequences, tile_row);
  const float* own_q = q_tile + (own.row0 - tile_row) * kDim;
  float maximum[kOwned], denominator[kOwned], sum[kOwned][kDim / kWarp] = {};
#pragma unroll
  for (int r = 0; r < kOwned; ++r) {
    maximum[r] = -INFINITY;
    denominator[r] = 0;
  }
  const int64_t key_begin =
      args.cu_seqlens[sequence_of(args.cu_seqlens, problem.sequences, tile_row)];
  for (int64_t key0 = key_begin; key0 < tile_end; key0 += kTile) {
    __syncthreads();  // q_tile is there; the last tile's values have been read
    load_tile<kDim, kDim + 1>(kv_tile, k, key0, args.rows, args.kv_stride, head_dim);
    __syncthreads();
    float score[kOwned];
    dot_rows<kDim>(own_q, kv_tile, score);
#pragma unroll
    for (int r = 0; r < kOwned; ++r) {
      const int64_t key = key0 + lane;
      const bool seen = key >= own.first_key[r] && key <= own.row0 + r;
      const float s = seen ? score[r] * args.scale : -INFINITY;
      const float now = fmaxf(maximum[r], warp_max(s));
      const float shrink = now == maximum[r] ? 1.0f : expf(maximum[r] - now);
      const float p = seen ? expf(s - now) : 0.0f;
      denominator[r] = denominator[r] * shrink + warp_sum(p);
#pragma unroll
      for (int j = 0; j < kDim / kWarp; ++j) sum[r][j] *= shrink;
      maximum[r] = now;
      score[r] = p;
    }
    __syncthreads();
    load_tile<kDim, kDim + 1>(kv_tile, v, key0, args.rows, args.kv_stride, head_dim);
    __syncthreads();
    add_weighted<kDim>(score, kv_tile, sum);
  }
#pragma unroll
  for (int r = 0; r < kOwned; ++r) {
    const int64_t row = own.row0 + r;
    if (row >= args.rows) break;
#pragma unroll
    for (int j = 0; j < kDim / kWarp; ++j) sum[r][j] /= denominator[r];
    if (lane == 0) args.lse[head * args.rows + row] = maximum[r] + logf(denominator[r]);
  }
  store_rows<kDim>(static_cast<T*>(args.out) + head * args.head_dim, own.row0, args.rows,
                   args.heads * args.head_dim, head_dim, sum);
}

// One warp per (row, head).
template <typename T>
__global__ void __launch_bounds__(kBlock) delta_kernel(BackwardProblem problem) {
  const AttentionArgs& args = problem.args;
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const int64_t step = int64_t{gridDim.x} * (kBlock / kWarp);
  int64_t item = int64_t{blockIdx.x} * (kBlock / kWarp) + threadIdx.x / kWarp;
  for (; item < args.rows * args.heads; item += step) {
    const int64_t row = item / args.heads;
    const int64_t head = item - row * args.heads;
    const T* out = static_cast<const T*>(args.out) + item * args.head_dim;
    const T* dout = static_cast<const T*>(problem.dout) + item * args.head_dim;
    float sum = 0;
    for (int64_t d = lane; d < args.head_dim; d += kWarp) {
      sum += to_float(out[d]) * to_float(dout[d]);
    }
    sum = warp_sum(sum);
    if (lane == 0) problem.delta[head * args.rows + row] = sum;
  }
}

// Blocks: x over query tiles, y over heads.
template <typename T, int kDim>
__global__ void __launch_bounds__(kBlock) dq_kernel(BackwardProblem problem) {
  extern __shared__ float memory[];
  float* q_tile = memory;                       // (kTile, kDim)
  float* dout_tile = q_tile + kTile * kDim;     // (kTile, kDim)
  float* k_tile = dout_tile + kTile * kDim;     // (kTile, kDim + 1)
  float* v_tile = k_tile + kTile * (kDim + 1);  // (kTile, kDim + 1)
  const AttentionArgs& args = problem.args;
  const int head_dim = static_cast<int>(args.head_dim);
  const int64_t head = blockIdx.y;
  const int64_t kv_offset = head / (args.heads / args.kv_heads) * args.head_dim;
  const int64_t tile_row = int64_t{blockIdx.x} * kTile;
  const int64_t tile_end = tile_row + kTile < args.rows ? tile_row + kTile : args.rows;
  const int lane = static_cast<int>(threadIdx.x % kWarp);

  load_tile<kDim, kDim>(q_tile, static_cast<const T*>(args.q) + head * args.head_dim, tile_row,
                        args.rows, args.q_stride, head_dim);
  load_tile<kDim, kDim>(dout_tile, static_cast<const T*>(problem.dout) + head * args.head_dim,
                        tile_row, args.rows, args.heads * args.head_dim, head_dim);
  const OwnedQueries own = owned_queries(args, problem.sequences, tile_row);
  const int64_t own_offset = (own.row0 - tile_row) * kDim;
  float lse[kOwned], delta[kOwned], sum[kOwned][kDim / kWarp] = {};
#pragma unroll
  for (int r = 0; r < kOwned; ++r) {
    const int64_t at = head * args.rows + own.row0 + r;
    const bool inside = own.row0 + r < args.rows;
    lse[r] = inside ? args.lse[at] : 0.0f;
    delta[r] = inside ? problem.delta[at] : 0.0f;
  }
  const int64_t key_begin =
      args.cu_seqlens[sequence_of(args.cu_seqlens, problem.sequences, tile_row)];
  for (int64_t key0 = key_begin; key0 < tile_end; key0 += kTile) {
    __syncthreads();  // the query tiles are there; the last key tiles have been read
    load_tile<kDim, kDim + 1>(k_tile, static_cast<const T*>(args.k) + kv_offset, key0, args.rows,
                              args.kv_stride, head_dim);
    load_tile<kDim, kDim + 1>(v_tile, static_cast<const T*>(args.v) + kv_offset, key0, args.rows,
                              args.kv_stride, head_dim);
    __syncthreads();
    float score[kOwned], dp[kOwned];
    dot_rows<kDim>(q_tile + own_offset, k_tile, score);
    dot_rows<kDim>(dout_tile + own_offset, v_tile, dp);
#pragma unroll
    for (int r = 0; r < kOwned; ++r) {
      const int64_t key = key0 + lane;
      const bool seen = key >= own.first_key[r] && key <= own.row0 + r;
      const float p = seen ? expf(score[r] * args.scale - lse[r]) : 0.0f;
      score[r] = p * (dp[r] - delta[r]) * args.scale;
    }
    add_weighted<kDim>(score, k_tile, sum);
  }
  store_rows<kDim>(static_cast<T*>(problem.dq) + head * args.head_dim, own.row0, args.rows,
                   args.q_stride, head_dim, sum);
}

// Blocks: x over key tiles, y over kv heads. The query heads of a kv head are added in their order.
template <typename T, int kDim>
__global__ void __launch_bounds__(kBlock) dkv_kernel(BackwardProblem problem) {
  extern __shared__ float memory[];
  float* k_tile = memory;                          // (kTile, kDim)
  float* v_tile = k_tile + kTile * kDim;           // (kTile, kDim)
  float* q_tile = v_tile + kTile * kDim;           // (kTile, kDim + 1)
  float* dout_tile = q_tile + kTile * (kDim + 1);  // (kTile, kDim + 1)
  const AttentionArgs& args = problem.args;
  const int head_dim = static_cast<int>(args.head_dim);
  const int64_t kv_head = blockIdx.y;
  const int64_t kv_offset = kv_head * args.head_dim;
  const int64_t group = args.heads / args.kv_heads;
  const int64_t tile_row = int64_t{blockIdx.x} * kTile;
  const int64_t tile_last = tile_row + kTile < args.rows ? tile_row + kTile - 1 : args.rows - 1;
  const int lane = static_cast<int>(threadIdx.x % kWarp);

  load_tile<kDim, kDim>(k_tile, static_cast<const T*>(args.k) + kv_offset, tile_row, args.rows,
                        args.kv_stride, head_dim);
  load_tile<kDim, kDim>(v_tile, static_cast<const T*>(args.v) + kv_offset, tile_row, args.rows,
                        args.kv_stride, head_dim);
  const int own_row = static_cast<int>(threadIdx.x) / kWarp * kOwned;
  int64_t query_end[kOwned];  // of the key's sequence; a key outside the batch is seen by none
#pragma unroll
  for (int r = 0; r < kOwned; ++r) {
    const int64_t key = tile_row + own_row + r;
    query_end[r] = key < args.rows
                       ? args.cu_seqlens[sequence_of(args.cu_seqlens, problem.sequences, key) + 1]
                       : 0;
  }
  const int64_t last_query =
      args.cu_seqlens[sequence_of(args.cu_seqlens, problem.sequences, tile_last) + 1];
  float dk[kOwned][kDim / kWarp] = {}, dv[kOwned][kDim / kWarp] = {};
  for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    for (int64_t query0 = tile_row; query0 < last_query; query0 += kTile) {
      __syncthreads();  // the key tiles are there; the last query tiles have been read
      load_tile<kDim, kDim + 1>(q_tile, static_cast<const T*>(args.q) + head * args.head_dim,
                                query0, args.rows, args.q_stride, head_dim);
      load_tile<kDim, kDim + 1>(dout_tile,
                                static_cast<const T*>(problem.dout) + head * args.head_dim, query0,
                                args.rows, args.heads * args.head_dim, head_dim);
      __syncthreads();
      const int64_t query = query0 + lane;
      const bool inside = query < args.rows;
      const float lse = inside ? args.lse[head * args.rows + query] : 0.0f;
      const float delta = inside ? problem.delta[head * args.rows + query] : 0.0f;
      float score[kOwned], dp[kOwned];
      dot_rows<kDim>(k_tile + own_row * kDim, q_tile, score);
      dot_rows<kDim>(v_tile + own_row * kDim, dout_tile, dp);
#pragma unroll
      for (int r = 0; r < kOwned; ++r) {
        const bool seen = query >= tile_row + own_row + r && query < query_end[r];
        const float p = seen ? expf(score[r] * args.scale - lse) : 0.0f;
        score[r] = p;
        dp[r] = p * (dp[r] - delta) * args.scale;
      }
      add_weighted<kDim>(score, dout_tile, dv);
      add_weighted<kDim>(dp, q_tile, dk);
    }
  }
  store_rows<kDim>(static_cast<T*>(problem.dk) + kv_offset, tile_row + own_row, args.rows,
                   args.kv_stride, head_dim, dk);
  store_rows<kDim>(static_cast<T*>(problem.dv) + kv_offset, tile_row + own_row, args.rows,
                   args.kv_stride, head_dim, dv);
}

template <typename Kernel, typename Argument>
void launch_tiles(Kernel kernel, const Argument& problem, int64_t rows, int64_t heads,
                  size_t shared_bytes, cudaStream_t stream) {
  ORLOP_CUDA(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                  cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(shared_bytes)));
  const dim3 grid(static_cast<unsigned>(ceil_div(rows, kTile)), static_cast<unsigned>(heads));
  kernel<<<grid, kBlock, shared_bytes, stream>>>(problem);
  ORLOP_CUDA_LAUNCHED("attention kernel");
}

// Calls launch.template operator()<kDim>() with the padded length of a head.
template <typename Launch>
void dispatch_head_dim(int64_t head_dim, Launch&& launch) {
  if (head_dim <= 64) return launch.template operator()<64>();
  if (head_dim <= 128) return launch.template operator()<128>();
  if (head_dim <= kMaxPlainHeadDim) return launch.template operator()<256>();
  throw Error(ErrorCode::kUsage, "attention: head_dim " + std::to_string(head_dim) + " is above " +
                                     std::to_string(kMaxPlainHeadDim));
}

int64_t sequences_of(const AttentionArgs& args) {
  return static_cast<int64_t>(args.cu_seqlens_host.size()) - 1;
}

}  // namespace

void plain_attention_forward(const AttentionArgs& args, cudaStream_t stream) {
  if (args.rows == 0) return;
  const Problem problem{args, sequences_of(args)};
  dispatch_float(args.dtype, "attention_forward", [&]<typename T>() {
    dispatch_head_dim(args.head_dim, [&]<int kDim>() {
      const size_t shared = (kTile * kDim + kTile * (kDim + 1)) * sizeof(float);
      launch_tiles(forward_kernel<T, kDim>, problem, args.rows, args.heads, shared, stream);
    });
  });
}

size_t plain_attention_backward_workspace_bytes(int64_t rows, int64_t heads) {
  return align_up(static_cast<size_t>(rows * heads) * sizeof(float), kDeviceAlignment);
}

void plain_attention_backward(const AttentionBackwardArgs& backward, cudaStream_t stream) {
  const AttentionArgs& args = backward.forward;
  if (args.rows == 0) return;
  const BackwardProblem problem{.args = args,
                                .sequences = sequences_of(args),
                                .dout = backward.dout,
                                .dq = backward.dq,
                                .dk = backward.dk,
                                .dv = backward.dv,
                                .delta = static_cast<float*>(args.workspace)};
  dispatch_float(args.dtype, "attention_backward", [&]<typename T>() {
    delta_kernel<T>
        <<<grid_blocks(args.rows * args.heads, kBlock / kWarp), kBlock, 0, stream>>>(problem);
    ORLOP_CUDA_LAUNCHED("delta_kernel");
    dispatch_head_dim(args.head_dim, [&]<int kDim>() {
      const size_t shared = 2 * (kTile * kDim + kTile * (kDim + 1)) * sizeof(float);
      launch_tiles(dq_kernel<T, kDim>, problem, args.rows, args.heads, shared, stream);
      launch_tiles(dkv_kernel<T, kDim>, problem, args.rows, args.kv_heads, shared, stream);
    });
  });
}

}  // namespace orlop::kernels

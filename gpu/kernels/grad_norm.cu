#include "cpu_adam/grad_norm.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "base/bytes.h"
#include "gpu/kernels/device_math.cuh"
#include "gpu/kernels/kernels.h"
#include "gpu/kernels/load_kernel.h"

// The square sums of cpu_adam/grad_norm.h in the same order: half a warp sums one chunk, one lane
// each; a block folds its 16 chunks; one block folds what the blocks left: one of a launch of its
// own, or the one that is done last. Block k starts at a multiple of 16 chunks, so the levels are
// those of one fold over all chunks.
namespace orlop::kernels {
namespace {

constexpr int kBlock = 256;
constexpr int kBlockChunks = kBlock / kNormLanes;
constexpr int64_t kBlockElements = kBlockChunks * kNormChunk;
// Elements of a lane that are loaded together.
constexpr int kInFlight = 16;
constexpr int kFoldBlock = 1024;

static_assert(kNormChunk % (kNormLanes * kInFlight) == 0);
static_assert((kBlockChunks & (kBlockChunks - 1)) == 0);

struct Scratch {
  double* sums;   // (blocks), then every second level of the fold
  double* other;  // (ceil(blocks / 2)), the levels between
  int64_t* bad;   // (blocks) first non-finite index, or INT64_MAX
  int64_t blocks;
};

Scratch make_scratch(void* scratch, int64_t numel) {
  Scratch out{};
  out.blocks = ceil_div(numel, kBlockElements);
  out.sums = static_cast<double*>(scratch);
  out.other = out.sums + out.blocks;
  out.bad = reinterpret_cast<int64_t*>(out.other + ceil_div(out.blocks, 2));
  return out;
}

// Rounds and squares element i into the lane's sum.
template <typename Out>
__device__ __forceinline__ void take(float value, Out* rounded, int64_t i, double& sum,
                                     int64_t& bad) {
  const Out r = from_float<Out>(value);
  if (rounded != nullptr) rounded[i] = r;
  const float exact = to_float(r);
  const double wide = exact;
  sum = __fma_rn(wide, wide, sum);  // the square is exact
  if (!isfinite(exact) && i < bad) bad = i;
}

// The 16 chunks of `block` by one thread block, into element `to` of the scratch.
template <typename In, typename Out>
__device__ __forceinline__ void sum_chunks(const In* grad, Out* rounded, int64_t numel,
                                           int64_t block, const Scratch& scratch, int64_t to) {
  __shared__ double sums[kBlockChunks];
  __shared__ int64_t bads[kBlockChunks];
  const int lane = static_cast<int>(threadIdx.x) % kNormLanes;
  const int slot = static_cast<int>(threadIdx.x) / kNormLanes;
  const int64_t chunks = (numel + kNormChunk - 1) / kNormChunk;
  const int64_t chunk = block * kBlockChunks + slot;
  const int64_t begin = chunk * kNormChunk;
  const int64_t end = begin + kNormChunk < numel ? begin + kNormChunk : numel;
  double sum = 0;
  int64_t bad = INT64_MAX;
  int64_t i = begin + lane;
  for (; i + (kInFlight - 1) * kNormLanes < end; i += kInFlight * kNormLanes) {
    In value[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) value[k] = grad[i + k * kNormLanes];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      take(to_float(value[k]), rounded, i + k * kNormLanes, sum, bad);
    }
  }
  for (; i < end; i += kNormLanes) take(to_float(grad[i]), rounded, i, sum, bad);
#pragma unroll
  for (int half = kNormLanes / 2; half > 0; half /= 2) {
    sum = __dadd_rn(sum, __shfl_down_sync(0xffffffffu, sum, half, kNormLanes));
    const int64_t other = __shfl_down_sync(0xffffffffu, bad, half, kNormLanes);
    bad = other < bad ? other : bad;
  }
  if (lane == 0) {
    sums[slot] = sum;
    bads[slot] = bad;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  const int64_t left = chunks - block * kBlockChunks;
  int count = left < kBlockChunks ? static_cast<int>(left) : kBlockChunks;
  for (int k = 1; k < count; ++k) bads[0] = bads[k] < bads[0] ? bads[k] : bads[0];
  while (count > 1) {
    const int pairs = count / 2;
    for (int k = 0; k < pairs; ++k) sums[k] = __dadd_rn(sums[2 * k], sums[2 * k + 1]);
    if (count % 2 == 1) sums[pairs] = sums[count - 1];
    count = pairs + count % 2;
  }
  scratch.sums[to] = sums[0];
  scratch.bad[to] = bads[0];
}

template <typename In, typename Out>
__global__ void __launch_bounds__(kBlock)
    round_grad_kernel(const In* grad, Out* rounded, int64_t numel, Scratch scratch) {
  sum_chunks(grad, rounded, numel, blockIdx.x, scratch, blockIdx.x);
}

// By a block of so many threads. Other blocks have written the scratch: it is read past the L1
// cache.
template <int kThreads>
__device__ __forceinline__ void fold(const Scratch& scratch, double* square_sum,
                                     int64_t* first_nonfinite) {
  __shared__ int64_t bads[kThreads];
  const int tid = static_cast<int>(threadIdx.x);
  int64_t bad = INT64_MAX;
  for (int64_t i = tid; i < scratch.blocks; i += kThreads) {
    const int64_t other = __ldcg(reinterpret_cast<const long long*>(scratch.bad + i));
    bad = other < bad ? other : bad;
  }
  bads[tid] = bad;
  double* from = scratch.sums;
  double* to = scratch.other;
  for (int64_t count = scratch.blocks; count > 1; count = (count + 1) / 2) {
    for (int64_t i = tid; 2 * i < count; i += kThreads) {
      const double even = __ldcg(from + 2 * i);
      to[i] = 2 * i + 1 < count ? __dadd_rn(even, __ldcg(from + 2 * i + 1)) : even;
    }
    __syncthreads();
    double* swapped = from;
    from = to;
    to = swapped;
  }
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (tid < half) bads[tid] = bads[tid + half] < bads[tid] ? bads[tid + half] : bads[tid];
    __syncthreads();
  }
  if (tid != 0) return;
  *square_sum = scratch.blocks > 0 ? __ldcg(from) : 0.0;
  *first_nonfinite = bads[0] == INT64_MAX ? -1 : bads[0];
}

__global__ void __launch_bounds__(kFoldBlock)
    fold_kernel(Scratch scratch, double* square_sum, int64_t* first_nonfinite) {
  fold<kFoldBlock>(scratch, square_sum, first_nonfinite);
}

// Several tensors of one launch, which takes the table with it.
constexpr int kMostTensors = 64;
struct SquareSumTable {
  const void* values[kMostTensors];
  int64_t numel[kMostTensors];
  int64_t first_block[kMostTensors + 1];  // where its blocks begin, and where all end
  double* square_sum[kMostTensors];
  int64_t* first_nonfinite[kMostTensors];
  int count;
};
// Blocks that are done, by tensor: zero between launches.
struct SquareSumProgress {
  unsigned blocks[kMostTensors];
};
static_assert(sizeof(SquareSumTable) + sizeof(Scratch) + sizeof(void*) <= 4096,
              "what a launch takes");

// A tensor without elements has a block too, which writes its result.
int64_t blocks_of(int64_t numel) { return std::max<int64_t>(1, ceil_div(numel, kBlockElements)); }

template <typename In>
__global__ void __launch_bounds__(kBlock)
    square_sums_kernel(const __grid_constant__ SquareSumTable table, Scratch scratch,
                       SquareSumProgress* progress) {
  const int64_t block = blockIdx.x;
  int tensor = 0;  // the last one that begins at this block or before it
  for (int high = table.count - 1; tensor < high;) {
    const int middle = (tensor + high + 1) / 2;
    if (table.first_block[middle] <= block) {
      tensor = middle;
    } else {
      high = middle - 1;
    }
  }
  const int64_t first = table.first_block[tensor];
  const int64_t blocks = table.first_block[tensor + 1] - first;
  sum_chunks<In, In>(static_cast<const In*>(table.values[tensor]), nullptr, table.numel[tensor],
                     block - first, scratch, block);
  __shared__ bool is_last;
  if (threadIdx.x == 0) {
    __threadfence();  // what this block has written comes before its count
    is_last = atomicAdd(&progress->blocks[tensor], 1U) == blocks - 1;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  fold<kBlock>({scratch.sums + first, scratch.other + first, scratch.bad + first, blocks},
               table.square_sum[tensor], table.first_nonfinite[tensor]);
  if (threadIdx.x == 0) progress->blocks[tensor] = 0;
}

// One thread: a few hundred FlatParams, each rank by rank, summed in their order.
__global__ void finish_norm_kernel(FinishNormArgs args) {
  double sum = 0;
  StepScalars out;
  for (int64_t i = 0; i < args.params; ++i) {
    for (int64_t rank = 0; rank < args.ranks; ++rank) {
      const int64_t at = rank * args.rank_stride + i;
      sum = __dadd_rn(sum, args.square_sums[at]);
      if (out.nonfinite_param < 0 && args.first_nonfinite[at] >= 0) {
        out.nonfinite_param = i;
        out.nonfinite_index = args.first_nonfinite[at];
        out.nonfinite_rank = rank;
      }
    }
  }
  const double loss_scale = args.loss_scale;
  out.grad_norm = __ddiv_rn(__dsqrt_rn(sum), loss_scale);
  double clip = 1;
  if (args.max_norm > 0) {
    const double limit = __ddiv_rn(args.max_norm, __dadd_rn(out.grad_norm, 1e-6));
    clip = limit < 1 ? limit : 1.0;
  }
  out.grad_scale = __double2float_rn(__ddiv_rn(clip, loss_scale));
  out.skip = out.nonfinite_param >= 0 ? 1 : 0;
  *args.out = out;
}

}  // namespace

size_t grad_norm_scratch_bytes(int64_t numel) {
  const int64_t blocks = ceil_div(numel, kBlockElements);
  return align_up(static_cast<size_t>(2 * blocks + ceil_div(blocks, 2)) * sizeof(double),
                  kDeviceAlignment);
}

void round_grad(const RoundGradArgs& args, cudaStream_t stream) {
  const Scratch scratch = make_scratch(args.scratch, args.numel);
  if (args.numel > 0) {
    dispatch_float(args.out_dtype, "round_grad", [&]<typename Out>() {
      auto* rounded = static_cast<Out*>(args.rounded);
      if (rounded == nullptr && !std::is_same_v<Out, float>) {
        throw Error(ErrorCode::kUsage, "round_grad: rounded is null, but its dtype is not F32");
      }
      round_grad_kernel<float, Out><<<static_cast<unsigned>(scratch.blocks), kBlock, 0, stream>>>(
          args.grad, rounded, args.numel, scratch);
      ORLOP_CUDA_LAUNCHED("round_grad_kernel");
    });
  }
  fold_kernel<<<1, kFoldBlock, 0, stream>>>(scratch, args.square_sum, args.first_nonfinite);
  ORLOP_CUDA_LAUNCHED("fold_kernel");
}

size_t square_sums_scratch_bytes(std::span<const SquareSumArgs> tensors) {
  int64_t blocks = 0;
  for (const SquareSumArgs& tensor : tensors) blocks += blocks_of(tensor.numel);
  // Sums, the levels between and bad indices. Every launch uses it from its begin.
  return kSquareSumsZeroBytes +
         align_up(static_cast<size_t>(3 * blocks) * sizeof(double), kDeviceAlignment);
}

namespace {

static_assert(sizeof(SquareSumProgress) <= kSquareSumsZeroBytes);

void launch(const SquareSumTable& table, DType dtype, void* scratch, cudaStream_t stream) {
  const int64_t blocks = table.first_block[table.count];
  auto* progress = static_cast<SquareSumProgress*>(scratch);
  auto* sums = reinterpret_cast<double*>(static_cast<std::byte*>(scratch) + kSquareSumsZeroBytes);
  const Scratch parts{sums, sums + blocks, reinterpret_cast<int64_t*>(sums + 2 * blocks), blocks};
  dispatch_float(dtype, "square_sums", [&]<typename In>() {
    square_sums_kernel<In>
        <<<static_cast<unsigned>(blocks), kBlock, 0, stream>>>(table, parts, progress);
    ORLOP_CUDA_LAUNCHED("square_sums_kernel");
  });
}

}  // namespace

void load_square_sums() {
  load_kernel(square_sums_kernel<float>);
  load_kernel(square_sums_kernel<bf16>);
  load_kernel(square_sums_kernel<fp16>);
}

void square_sums(std::span<const SquareSumArgs> tensors, void* scratch, cudaStream_t stream) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    SquareSumTable table{};
    for (const SquareSumArgs& tensor : tensors) {
      if (tensor.dtype != dtype) continue;
      const int64_t first = table.first_block[table.count];
      table.values[table.count] = tensor.values;
      table.numel[table.count] = tensor.numel;
      table.square_sum[table.count] = tensor.square_sum;
      table.first_nonfinite[table.count] = tensor.first_nonfinite;
      table.first_block[++table.count] = first + blocks_of(tensor.numel);
      if (table.count < kMostTensors) continue;
      launch(table, dtype, scratch, stream);
      table.count = 0;  // first_block[0] stays 0
    }
    if (table.count > 0) launch(table, dtype, scratch, stream);
  }
}

void finish_norm(const FinishNormArgs& args, cudaStream_t stream) {
  finish_norm_kernel<<<1, 1, 0, stream>>>(args);
  ORLOP_CUDA_LAUNCHED("finish_norm_kernel");
}

}  // namespace orlop::kernels

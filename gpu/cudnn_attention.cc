#include <algorithm>
#include <cmath>
#include <mutex>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/check.h"
#include "base/log.h"
#include "gpu/attention_backend.h"
#include "gpu/cuda_check.h"
#include "gpu/cudnn_graphs.h"
#include "gpu/kernels/kernels.h"

namespace orlop {
namespace {

// Above it the deterministic backward pass of cuDNN 9.14 wrote NaN on an H100; the plain kernels
// take over.
constexpr int64_t kMaxHeadDim = 128;

// Deterministic backward keeps a (heads, length, length) matrix of 2 bytes per sequence. A call is
// cut into pieces, first of whole sequences, then of heads, so that a piece stays below this limit
// where it can.
constexpr int64_t kPieceBytes = 600 * int64_t{kMiB};
// Sequences of equal length that is a multiple of this go through the dense graphs, all others
// through ragged ones, whose lengths are rounded up so that a handful of graphs serves any batch.
constexpr int64_t kDenseGrain = 128;
constexpr size_t kSlotBytes = kDeviceAlignment;

int64_t round_up(int64_t value, int64_t grain) { return ceil_div(value, grain) * grain; }

// Four steps per doubling, at least kDenseGrain.
int64_t ragged_length(int64_t length) {
  int64_t power = kDenseGrain;
  while (power * 2 <= length) power *= 2;
  return round_up(length, std::max(kDenseGrain, power / 4));
}

// What deterministic backward of one sequence takes at most: the matrix, dk and dv of every query
// head, and two floats per row and head.
int64_t deterministic_bytes(int64_t heads, int64_t length, int64_t head_dim) {
  const int64_t matrix = round_up(length, 64) * round_up(length, 128) * 2;
  return heads * (matrix + length * (4 * head_dim + 8));
}

// The largest divisor of `value` that is at most `limit`, at least 1.
int64_t divisor_below(int64_t value, int64_t limit) {
  int64_t divisor = std::clamp<int64_t>(limit, 1, value);
  while (value % divisor != 0) --divisor;
  return divisor;
}

struct Problem {
  int64_t heads, kv_heads, head_dim, q_stride, kv_stride;
  float scale;
  DType dtype;
  bool backward;
};

// One call of cuDNN: `batches` sequences from row `row` on, query heads from `head` on.
struct Piece {
  const SdpaGraph* graph = nullptr;
  SdpaShape shape;
  int64_t row = 0, head = 0, kv_head = 0;
  int64_t true_length = 0;
};

size_t stats_bytes(const SdpaShape& shape) {
  return align_up(static_cast<size_t>(shape.batches * shape.heads * shape.length) * sizeof(float),
                  kDeviceAlignment);
}

size_t piece_bytes(const Piece& piece) {
  return kSlotBytes + stats_bytes(piece.shape) + workspace_bytes(*piece.graph);
}

void* advanced(void* p, int64_t elements, DType dtype) {
  return static_cast<char*>(p) + elements * static_cast<int64_t>(dtype_bytes(dtype));
}
const void* advanced(const void* p, int64_t elements, DType dtype) {
  return static_cast<const char*>(p) + elements * static_cast<int64_t>(dtype_bytes(dtype));
}

bool aligned16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

class CudnnAttention final : public AttentionBackend {
 public:
  explicit CudnnAttention(bool deterministic) : deterministic_(deterministic) {}

  std::string description() const override { return "cuDNN " + graphs_.version(); }

  size_t workspace_bytes(const AttentionShape& shape) override;
  bool forward(CudaQueue& queue, const AttentionArgs& args) override;
  bool backward(CudaQueue& queue, const AttentionBackwardArgs& args) override;

 private:
  // Appends the pieces of `batches` equal sequences from `row` on; false when cuDNN refuses one.
  bool append_pieces(const Problem& problem, int64_t row, int64_t batches, int64_t length,
                     bool ragged, std::vector<Piece>& pieces);
  // Empty when cuDNN refuses the call.
  std::vector<Piece> pieces_of(const AttentionArgs& args, bool backward);
  void run_piece(CudaQueue& queue, const Piece& piece, const AttentionArgs& args,
                 const AttentionBackwardArgs* backward);
  void run(CudaQueue& queue, const std::vector<Piece>& pieces, const AttentionArgs& args,
           const AttentionBackwardArgs* backward);

  bool deterministic_;
  std::mutex mutex_;  // one graph cache, one handle
  SdpaGraphs graphs_;
};

bool CudnnAttention::append_pieces(const Problem& problem, int64_t row, int64_t batches,
                                   int64_t length, bool ragged, std::vector<Piece>& pieces) {
  const int64_t group = problem.heads / problem.kv_heads;
  const int64_t graph_length = ragged ? ragged_length(length) : length;
  int64_t piece_batches = batches;
  int64_t piece_kv_heads = problem.kv_heads;
  if (problem.backward && deterministic_) {
    const auto fitting = [&](int64_t heads) {
      return kPieceBytes / deterministic_bytes(heads, graph_length, problem.head_dim);
    };
    piece_batches = divisor_below(batches, fitting(problem.heads));
    piece_kv_heads = divisor_below(problem.kv_heads, fitting(group));
  }
  Piece piece;
  piece.true_length = length;
  piece.shape = {.batches = piece_batches,
                 .length = graph_length,
                 .heads = piece_kv_heads * group,
                 .kv_heads = piece_kv_heads,
                 .head_dim = problem.head_dim,
                 .q_stride = problem.q_stride,
                 .kv_stride = problem.kv_stride,
                 .out_stride = problem.heads * problem.head_dim,
                 .scale = problem.scale,
                 .dtype = problem.dtype,
                 .ragged = ragged,
                 .backward = problem.backward,
                 .deterministic = problem.backward && deterministic_};
  piece.graph = graphs_.find(piece.shape);
  if (piece.graph == nullptr) return false;
  for (int64_t batch = 0; batch < batches; batch += piece_batches) {
    for (int64_t kv_head = 0; kv_head < problem.kv_heads; kv_head += piece_kv_heads) {
      piece.row = row + batch * length;
      piece.kv_head = kv_head;
      piece.head = kv_head * group;
      pieces.push_back(piece);
    }
  }
  return true;
}

bool is_supported(const Problem& problem) {
  const bool half = problem.dtype == DType::kBF16 || problem.dtype == DType::kF16;
  return half && problem.head_dim % 8 == 0 && problem.head_dim <= kMaxHeadDim &&
         problem.q_stride % 8 == 0 && problem.kv_stride % 8 == 0;
}

std::vector<Piece> CudnnAttention::pieces_of(const AttentionArgs& args, bool backward) {
  const Problem problem{args.heads,     args.kv_heads, args.head_dim, args.q_stride,
                        args.kv_stride, args.scale,    args.dtype,    backward};
  std::vector<Piece> pieces;
  if (!is_supported(problem) || !aligned16(args.q) || !aligned16(args.k) || !aligned16(args.v) ||
      !aligned16(args.out)) {
    return pieces;
  }
  const auto& offsets = args.cu_seqlens_host;
  const int64_t sequences = static_cast<int64_t>(offsets.size()) - 1;
  const int64_t first = offsets[1] - offsets[0];
  bool dense = first > 0 && first % kDenseGrain == 0;
  for (size_t i = 1; dense && i + 1 < offsets.size(); ++i) {
    dense = offsets[i + 1] - offsets[i] == first;
  }
  if (dense && append_pieces(problem, 0, sequences, first, false, pieces)) return pieces;
  for (size_t i = 0; i + 1 < offsets.size(); ++i) {
    const int64_t length = offsets[i + 1] - offsets[i];
    if (length == 0) continue;
    // Ragged offsets are int32 elements.
    const int64_t widest = std::max({args.q_stride, args.kv_stride, args.heads * args.head_dim});
    if (ragged_length(length) > INT32_MAX / widest ||
        !append_pieces(problem, offsets[i], 1, length, true, pieces)) {
      return {};
    }
  }
  return pieces;
}

void CudnnAttention::run_piece(CudaQueue& queue, const Piece& piece, const AttentionArgs& args,
                               const AttentionBackwardArgs* backward) {
  const SdpaShape& shape = piece.shape;
  const int64_t q_at = piece.row * shape.q_stride + piece.head * shape.head_dim;
  const int64_t kv_at = piece.row * shape.kv_stride + piece.kv_head * shape.head_dim;
  const int64_t out_at = piece.row * shape.out_stride + piece.head * shape.head_dim;
  auto* slot = static_cast<int32_t*>(args.workspace);
  auto* stats = reinterpret_cast<float*>(static_cast<char*>(args.workspace) + kSlotBytes);

  SdpaPointers pointers{.q = advanced(args.q, q_at, shape.dtype),
                        .k = advanced(args.k, kv_at, shape.dtype),
                        .v = advanced(args.v, kv_at, shape.dtype),
                        .out = advanced(args.out, out_at, shape.dtype),
                        .stats = stats,
                        .sequence = slot,
                        .workspace = reinterpret_cast<char*>(stats) + stats_bytes(shape)};
  if (shape.ragged) {
    kernels::set_sequence({piece.true_length, shape.q_stride, shape.kv_stride, shape.out_stride},
                          slot, queue.stream());
  }
  // cuDNN's stats are packed (batch, head, row); lse is (head, row of the whole batch).
  kernels::PermuteArgs permute{.from = stats,
                               .to = args.lse + piece.head * args.rows + piece.row,
                               .outer = shape.batches,
                               .rows = shape.heads,
                               .cols = piece.true_length,
                               .from_outer = shape.heads * shape.length,
                               .from_row = shape.length,
                               .from_col = 1,
                               .to_outer = piece.true_length,
                               .to_row = args.rows,
                               .to_col = 1};
  if (backward == nullptr) {
    graphs_.execute(*piece.graph, pointers, queue.stream());
    kernels::permute(permute, queue.stream());
    return;
  }
  permute.from = permute.to;
  permute.to = stats;
  std::swap(permute.from_outer, permute.to_outer);
  std::swap(permute.from_row, permute.to_row);
  if (piece.true_length < shape.length) {
    ORLOP_CUDA(cudaMemsetAsync(stats, 0, stats_bytes(shape), queue.stream()));
  }
  kernels::permute(permute, queue.stream());
  pointers.dout = advanced(backward->dout, out_at, shape.dtype);
  pointers.dq = advanced(backward->dq, q_at, shape.dtype);
  pointers.dk = advanced(backward->dk, kv_at, shape.dtype);
  pointers.dv = advanced(backward->dv, kv_at, shape.dtype);
  graphs_.execute(*piece.graph, pointers, queue.stream());
}

void CudnnAttention::run(CudaQueue& queue, const std::vector<Piece>& pieces,
                         const AttentionArgs& args, const AttentionBackwardArgs* backward) {
  for (const Piece& piece : pieces) {
    check(piece_bytes(piece) <= args.workspace_bytes, ErrorCode::kUsage,
          "attention {}: {} of workspace given, {} needed for {} sequences of {} rows, {} heads",
          backward != nullptr ? "backward" : "forward", format_bytes(args.workspace_bytes),
          format_bytes(piece_bytes(piece)), piece.shape.batches, piece.shape.length,
          piece.shape.heads);
    run_piece(queue, piece, args, backward);
  }
}

bool CudnnAttention::forward(CudaQueue& queue, const AttentionArgs& args) {
  const std::lock_guard lock(mutex_);
  const std::vector<Piece> pieces = pieces_of(args, false);
  if (pieces.empty()) return false;
  run(queue, pieces, args, nullptr);
  return true;
}

bool CudnnAttention::backward(CudaQueue& queue, const AttentionBackwardArgs& args) {
  if (!aligned16(args.dout) || !aligned16(args.dq) || !aligned16(args.dk) || !aligned16(args.dv)) {
    return false;
  }
  const std::lock_guard lock(mutex_);
  const std::vector<Piece> pieces = pieces_of(args.forward, true);
  if (pieces.empty()) return false;
  run(queue, pieces, args.forward, &args);
  return true;
}

size_t CudnnAttention::workspace_bytes(const AttentionShape& shape) {
  const std::lock_guard lock(mutex_);
  // Strides and scale as the blocks use them: q, k and v beside each other in one row.
  const int64_t width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim;
  const Problem problem{shape.heads,    shape.kv_heads,
                        shape.head_dim, width,
                        width,          1.0f / std::sqrt(static_cast<float>(shape.head_dim)),
                        shape.dtype,    shape.backward};
  if (!is_supported(problem)) return 0;
  const int64_t longest = std::clamp<int64_t>(shape.max_sequence, 1, shape.rows);
  std::vector<Piece> pieces;
  if (longest % kDenseGrain == 0 && shape.rows % longest == 0) {
    append_pieces(problem, 0, shape.rows / longest, longest, false, pieces);
  }
  append_pieces(problem, 0, 1, longest, true, pieces);
  size_t bytes = 0;
  for (const Piece& piece : pieces) bytes = std::max(bytes, piece_bytes(piece));
  if (bytes > 0 && shape.backward && deterministic_) {
    // Shorter sequences than the longest may be cut into larger pieces, up to the limit.
    const int64_t all =
        ceil_div(shape.rows, longest) * deterministic_bytes(shape.heads, longest, shape.head_dim);
    bytes = std::max(bytes, static_cast<size_t>(std::min(all, kPieceBytes)));
  }
  return bytes;
}

}  // namespace

std::unique_ptr<AttentionBackend> make_cudnn_attention(bool deterministic) {
  try {
    return std::make_unique<CudnnAttention>(deterministic);
  } catch (const Error& error) {
    log_info("attention: plain kernels are used: {}", error.what());
    return nullptr;
  }
}

}  // namespace orlop

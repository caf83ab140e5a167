#include <algorithm>

#include "base/bytes.h"
#include "base/check.h"
#include "host/element_types.h"
#include "host/host_ops.h"
#include "host/host_queue.h"
#include "host/parallel.h"

namespace orlop::host {
namespace {

// A run of kAttentionBlock query rows (fewer at a sequence's end).
struct QueryBlock {
  int64_t sequence = 0;
  int64_t block = 0;  // within the sequence
};

int64_t length_of(const AttentionArgs& args, int64_t sequence) {
  const auto& cu = args.cu_seqlens_host;
  return cu[static_cast<size_t>(sequence) + 1] - cu[static_cast<size_t>(sequence)];
}

int64_t sequences_of(const AttentionArgs& args) {
  return static_cast<int64_t>(args.cu_seqlens_host.size()) - 1;
}

int64_t longest_sequence(const AttentionArgs& args) {
  int64_t longest = 0;
  for (int64_t s = 0; s < sequences_of(args); ++s) longest = std::max(longest, length_of(args, s));
  return longest;
}

int64_t count_blocks(const AttentionArgs& args) {
  int64_t blocks = 0;
  for (int64_t s = 0; s < sequences_of(args); ++s) {
    blocks += ceil_div(length_of(args, s), kAttentionBlock);
  }
  return blocks;
}

QueryBlock find_block(const AttentionArgs& args, int64_t index) {
  int64_t sequence = 0;
  for (;; ++sequence) {
    const int64_t blocks = ceil_div(length_of(args, sequence), kAttentionBlock);
    if (index < blocks) return {sequence, index};
    index -= blocks;
  }
}

AttentionHead head_of(const AttentionArgs& args, int64_t sequence, int64_t head) {
  const int64_t row = args.cu_seqlens_host[static_cast<size_t>(sequence)];
  const int64_t kv_head = head / (args.heads / args.kv_heads);
  const int64_t out_stride = args.heads * args.head_dim;
  const int64_t kv = row * args.kv_stride + kv_head * args.head_dim;
  return {.q = at(args.q, row * args.q_stride + head * args.head_dim, args.dtype),
          .k = at(args.k, kv, args.dtype),
          .v = at(args.v, kv, args.dtype),
          .out = at(args.out, row * out_stride + head * args.head_dim, args.dtype),
          .lse = args.lse + head * args.rows + row,
          .length = length_of(args, sequence),
          .head_dim = args.head_dim,
          .q_stride = args.q_stride,
          .kv_stride = args.kv_stride,
          .out_stride = out_stride,
          .scale = args.scale};
}

// dk and dv of every query head, before the heads of a group are added: (2, rows, heads, head_dim)
// fp32.
size_t partial_bytes(int64_t rows, int64_t heads, int64_t head_dim) {
  return align_up(static_cast<size_t>(2 * rows * heads * head_dim) * sizeof(float),
                  kDeviceAlignment);
}

void check_args(const AttentionArgs& args, size_t needed_bytes) {
  check(args.kv_heads > 0 && args.heads % args.kv_heads == 0, ErrorCode::kUsage,
        "attention: {} heads cannot share {} key-value heads evenly", args.heads, args.kv_heads);
  check(args.cu_seqlens_host.size() >= 2 && args.cu_seqlens_host.back() == args.rows,
        ErrorCode::kUsage, "attention: the sequences do not end at row {}", args.rows);
  check(args.workspace_bytes >= needed_bytes, ErrorCode::kUsage,
        "attention: the workspace has {} bytes, {} are needed", args.workspace_bytes, needed_bytes);
}

}  // namespace

int64_t HostOps::attention_thread_floats(int64_t head_dim, int64_t max_sequence,
                                         bool backward) const {
  const int64_t floats = kernels_.f32.attention_scratch(head_dim, max_sequence, backward);
  return ceil_div(floats, 64) * 64;
}

size_t HostOps::attention_workspace_bytes(const AttentionShape& shape) const {
  const int64_t floats =
      attention_thread_floats(shape.head_dim, shape.max_sequence, shape.backward);
  const size_t scratch = static_cast<size_t>(threads_ * floats) * sizeof(float);
  return scratch + (shape.backward ? partial_bytes(shape.rows, shape.heads, shape.head_dim) : 0);
}

void HostOps::attention_forward(Queue& queue, const AttentionArgs& args) {
  check_args(args, attention_workspace_bytes({args.rows, args.heads, args.kv_heads, args.head_dim,
                                              longest_sequence(args), args.dtype, false}));
  host_queue(queue).enqueue("attention", [this, args] { run_attention_forward(args); });
}

void HostOps::attention_backward(Queue& queue, const AttentionBackwardArgs& args) {
  const AttentionArgs& forward = args.forward;
  check_args(forward, attention_workspace_bytes({forward.rows, forward.heads, forward.kv_heads,
                                                 forward.head_dim, longest_sequence(forward),
                                                 forward.dtype, true}));
  host_queue(queue).enqueue("attention_backward", [this, args] { run_attention_backward(args); });
}

void HostOps::run_attention_forward(const AttentionArgs& args) {
  const Kernels& kernels = this->kernels(args.dtype);
  const int64_t blocks = count_blocks(args);
  const int64_t floats = attention_thread_floats(args.head_dim, longest_sequence(args), false);
  auto* scratch = static_cast<float*>(args.workspace);
  // Later blocks see more keys: they go first, so that the threads end together.
  parallel_items(threads_, blocks * args.heads, [&](int64_t item, int thread) {
    const QueryBlock at = find_block(args, blocks - 1 - item / args.heads);
    kernels.attention_forward(head_of(args, at.sequence, item % args.heads), at.block,
                              scratch + thread * floats);
  });
}

// Each item is one query head of one sequence, in a fixed order inside; the heads that share keys
// and values are added afterwards in head order. So nothing depends on which thread took what.
void HostOps::run_attention_backward(const AttentionBackwardArgs& args) {
  const AttentionArgs& forward = args.forward;
  const Kernels& kernels = this->kernels(forward.dtype);
  const int64_t heads = forward.heads, width = forward.head_dim, out_stride = heads * width;
  const int64_t floats = attention_thread_floats(width, longest_sequence(forward), true);
  auto* dk = static_cast<float*>(forward.workspace);
  float* dv = dk + forward.rows * out_stride;
  auto* scratch = reinterpret_cast<float*>(static_cast<std::byte*>(forward.workspace) +
                                           partial_bytes(forward.rows, heads, width));
  parallel_items(threads_, sequences_of(forward) * heads, [&](int64_t item, int thread) {
    const int64_t sequence = item / heads, head = item % heads;
    const int64_t row = forward.cu_seqlens_host[static_cast<size_t>(sequence)];
    const int64_t out = row * out_stride + head * width;
    kernels.attention_backward(
        {.forward = head_of(forward, sequence, head),
         .dout = at(args.dout, out, forward.dtype),
         .dq = at(args.dq, row * forward.q_stride + head * width, forward.dtype),
         .dk = dk + out,
         .dv = dv + out,
         .partial_stride = out_stride},
        scratch + thread * floats);
  });
  const int64_t group = heads / forward.kv_heads;
  const auto add_group = [&](float* partial, void* gradient) {
    for (int64_t h = 1; h < group; ++h)
      kernels_.f32.accumulate(partial, partial + h * width, width);
    kernels.narrow(partial, gradient, width);
  };
  parallel_for(threads_, forward.rows, [&](int64_t r) {
    for (int64_t kv_head = 0; kv_head < forward.kv_heads; ++kv_head) {
      const int64_t from = r * out_stride + kv_head * group * width;
      const int64_t to = r * forward.kv_stride + kv_head * width;
      add_group(dk + from, at(args.dk, to, forward.dtype));
      add_group(dv + from, at(args.dv, to, forward.dtype));
    }
  });
}

}  // namespace orlop::host

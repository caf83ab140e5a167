#include "gpu/attention.h"

#include <algorithm>

#include "base/bytes.h"
#include "base/check.h"
#include "gpu/attention_backend.h"
#include "gpu/kernels/kernels.h"

namespace orlop {
namespace {

void check_args(const AttentionArgs& args, const char* operation) {
  check(args.kv_heads > 0 && args.heads % args.kv_heads == 0, ErrorCode::kUsage,
        "{}: {} query heads are no multiple of {} key heads", operation, args.heads, args.kv_heads);
  check(args.cu_seqlens_host.size() >= 2 && args.cu_seqlens_host.front() == 0 &&
            args.cu_seqlens_host.back() == args.rows,
        ErrorCode::kUsage, "{}: the sequence offsets do not run from 0 to the {} rows", operation,
        args.rows);
}

void check_workspace(const AttentionArgs& args, size_t needed, const char* operation) {
  check(args.workspace_bytes >= needed, ErrorCode::kUsage,
        "{}: {} of workspace given, {} needed for {} rows of {} heads", operation,
        format_bytes(args.workspace_bytes), format_bytes(needed), args.rows, args.heads);
}

}  // namespace

Attention::Attention(std::unique_ptr<AttentionBackend> cudnn) : cudnn_(std::move(cudnn)) {}
Attention::~Attention() = default;

std::string Attention::description() const {
  return cudnn_ != nullptr ? cudnn_->description() : "plain kernels";
}

size_t Attention::workspace_bytes(const AttentionShape& shape) const {
  if (shape.rows == 0) return 0;
  // The plain kernels' share is always inside: a batch that cuDNN refuses, by its alignment or its
  // lengths, runs with the same workspace.
  const size_t plain =
      shape.backward ? kernels::plain_attention_backward_workspace_bytes(shape.rows, shape.heads)
                     : 0;
  return cudnn_ != nullptr ? std::max(plain, cudnn_->workspace_bytes(shape)) : plain;
}

void Attention::forward(CudaQueue& queue, const AttentionArgs& args) {
  if (args.rows == 0) return;
  check_args(args, "attention_forward");
  if (cudnn_ != nullptr && cudnn_->forward(queue, args)) return;
  kernels::plain_attention_forward(args, queue.stream());
}

void Attention::backward(CudaQueue& queue, const AttentionBackwardArgs& args) {
  if (args.forward.rows == 0) return;
  check_args(args.forward, "attention_backward");
  if (cudnn_ != nullptr && cudnn_->backward(queue, args)) return;
  check_workspace(
      args.forward,
      kernels::plain_attention_backward_workspace_bytes(args.forward.rows, args.forward.heads),
      "attention_backward");
  kernels::plain_attention_backward(args, queue.stream());
}

}  // namespace orlop

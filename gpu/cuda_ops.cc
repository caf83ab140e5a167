#include "gpu/cuda_ops.h"

#include <algorithm>

#include "base/bytes.h"
#include "base/check.h"
#include "cpu_adam/adam.h"
#include "gpu/attention_backend.h"
#include "gpu/device_scope.h"
#include "gpu/kernels/kernels.h"

namespace orlop {
namespace {

// What every operation does first: takes the queue as one of this backend, makes its device current
// and marks the work in the trace.
class Issue {
 public:
  Issue(Queue& queue, const char* operation)
      : queue_(cuda_queue(queue)), scope_(queue_.device()), span_(queue_.trace(), operation) {}

  CudaQueue& queue() const { return queue_; }
  cudaStream_t stream() const { return queue_.stream(); }

 private:
  CudaQueue& queue_;
  DeviceScope scope_;
  QueueTrace::Span span_;
};

// Logits of one LM-head chunk: large enough for matmuls at full speed, small beside the
// activations.
constexpr int64_t kHeadChunkBytes = 128 * int64_t{kMiB};
constexpr int64_t kHeadChunkGrain = 128;
constexpr int64_t kHeadChunkRows = 8192;

}  // namespace

CudaOps::CudaOps(const CudaOpsOptions& options)
    : device_(options.device),
      own_kernels_only_(options.own_kernels_only),
      matmul_(options.device, options.autotune),
      attention_(options.own_kernels_only ? nullptr
                                          : make_cudnn_attention(options.deterministic_attention)) {
}

void CudaOps::matmul(Queue& queue, const MatmulArgs& args) {
  const Issue issue(queue, "matmul");
  check(!args.accumulate || args.out_dtype == DType::kF32, ErrorCode::kUsage,
        "matmul {}x{}x{}: accumulation needs an F32 result, not {}", args.m, args.n, args.k,
        dtype_name(args.out_dtype));
  if (own_kernels_only_) return kernels::plain_matmul(args, issue.stream());
  matmul_.run(issue.queue(), args);
}

void CudaOps::bias_backward(Queue& queue, const void* dy, float* dbias, int64_t m, int64_t n,
                            DType dtype) {
  const Issue issue(queue, "bias_backward");
  void* workspace =
      issue.queue().workspace(kernels::bias_backward_workspace_bytes(m, n), "bias_backward");
  kernels::bias_backward(dy, dbias, m, n, dtype, workspace, issue.stream());
}

void CudaOps::norm_forward(Queue& queue, const NormArgs& args) {
  const Issue issue(queue, "norm_forward");
  kernels::norm_forward(args, issue.stream());
}

void CudaOps::norm_backward(Queue& queue, const NormBackwardArgs& args) {
  const Issue issue(queue, "norm_backward");
  void* workspace =
      issue.queue().workspace(kernels::norm_backward_workspace_bytes(args), "norm_backward");
  kernels::norm_backward(args, workspace, issue.stream());
}

void CudaOps::rope(Queue& queue, const RopeArgs& args) {
  const Issue issue(queue, "rope");
  kernels::rope(args, issue.stream());
}

size_t CudaOps::attention_workspace_bytes(const AttentionShape& shape) const {
  const DeviceScope scope(device_);  // may build cuDNN's graphs
  return attention_.workspace_bytes(shape);
}

void CudaOps::attention_forward(Queue& queue, const AttentionArgs& args) {
  const Issue issue(queue, "attention_forward");
  attention_.forward(issue.queue(), args);
}

void CudaOps::attention_backward(Queue& queue, const AttentionBackwardArgs& args) {
  const Issue issue(queue, "attention_backward");
  attention_.backward(issue.queue(), args);
}

void CudaOps::activation_forward(Queue& queue, const ActivationArgs& args) {
  const Issue issue(queue, "activation_forward");
  kernels::activation_forward(args, issue.stream());
}

void CudaOps::activation_backward(Queue& queue, const ActivationArgs& args) {
  const Issue issue(queue, "activation_backward");
  kernels::activation_backward(args, issue.stream());
}

void CudaOps::embedding_forward(Queue& queue, const EmbeddingArgs& args) {
  const Issue issue(queue, "embedding_forward");
  kernels::embedding_forward(args, issue.stream());
}

void CudaOps::embedding_backward(Queue& queue, const EmbeddingBackwardArgs& args) {
  const Issue issue(queue, "embedding_backward");
  kernels::embedding_backward(args, issue.stream());
}

void CudaOps::cross_entropy(Queue& queue, const CrossEntropyArgs& args) {
  const Issue issue(queue, "cross_entropy");
  kernels::cross_entropy(args, issue.stream());
}

void CudaOps::add(Queue& queue, void* to, const void* from, int64_t numel, DType dtype) {
  const Issue issue(queue, "add");
  kernels::add(to, from, numel, dtype, issue.stream());
}

void CudaOps::narrow(Queue& queue, const float* from, void* to, int64_t numel, DType dtype) {
  const Issue issue(queue, "narrow");
  kernels::narrow(from, to, numel, dtype, issue.stream());
}

void CudaOps::sum_rows(Queue& queue, const void* from, float* to, int64_t rows, int64_t numel,
                       DType dtype) {
  const Issue issue(queue, "sum_rows");
  kernels::sum_rows(from, to, rows, numel, dtype, issue.stream());
}

size_t CudaOps::grad_norm_scratch_bytes(int64_t numel) const {
  return kernels::grad_norm_scratch_bytes(numel);
}

void CudaOps::round_grad(Queue& queue, const RoundGradArgs& args) {
  const Issue issue(queue, "round_grad");
  kernels::round_grad(args, issue.stream());
}

void CudaOps::finish_norm(Queue& queue, const FinishNormArgs& args) {
  const Issue issue(queue, "finish_norm");
  kernels::finish_norm(args, issue.stream());
}

void CudaOps::device_adam(Queue& queue, const DeviceAdamArgs& args) {
  check_adam_shard(args.shard);
  ORLOP_INVARIANT(args.shard.grad_dtype == args.shard.compute_dtype);
  const AdamConstants constants = adam_constants(args.hyper, 1.0f);  // grad_scale: on the device
  const Issue issue(queue, "device_adam");
  kernels::device_adam(args, constants, issue.stream());
}

int64_t CudaOps::head_chunk_rows(int64_t vocab, DType dtype) const {
  const auto row_bytes = static_cast<int64_t>(dtype_bytes(dtype)) * std::max<int64_t>(vocab, 1);
  const int64_t rows = kHeadChunkBytes / row_bytes / kHeadChunkGrain * kHeadChunkGrain;
  return std::clamp(rows, kHeadChunkGrain, kHeadChunkRows);
}

}  // namespace orlop

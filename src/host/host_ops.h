#pragma once

#include <cstddef>
#include <memory>

#include "backend/ops.h"
#include "host/kernels.h"
#include "host/matmul.h"

namespace orlop::host {

struct HostOpsOptions {
  bool reference = false;
  int threads = 1;
  Workspace workspace;  // host_workspace_bytes()
};

// Memory that the operations need outside the arena: panels of matmuls and partial column sums.
size_t host_workspace_bytes(bool reference, int threads);

// The operations on plain memory. One implementation issues and divides the work; the arithmetic
// comes from a kernel set and a matmul strategy: vectorised kernels with oneDNN, or the fp64
// reference. All that use the workspace belong on one queue, the compute queue.
std::unique_ptr<Ops> make_host_ops(const HostOpsOptions& options);

class HostOps final : public Ops {
 public:
  HostOps(const KernelSet& kernels, std::unique_ptr<Matmul> matmul, const HostOpsOptions& options);

  void matmul(Queue& queue, const MatmulArgs& args) override;
  void bias_backward(Queue& queue, const void* dy, float* dbias, int64_t m, int64_t n,
                     DType dtype) override;
  void norm_forward(Queue& queue, const NormArgs& args) override;
  void norm_backward(Queue& queue, const NormBackwardArgs& args) override;
  void rope(Queue& queue, const RopeArgs& args) override;
  size_t attention_workspace_bytes(const AttentionShape& shape) const override;
  void attention_forward(Queue& queue, const AttentionArgs& args) override;
  void attention_backward(Queue& queue, const AttentionBackwardArgs& args) override;
  void activation_forward(Queue& queue, const ActivationArgs& args) override;
  void activation_backward(Queue& queue, const ActivationArgs& args) override;
  void embedding_forward(Queue& queue, const EmbeddingArgs& args) override;
  void embedding_backward(Queue& queue, const EmbeddingBackwardArgs& args) override;
  void cross_entropy(Queue& queue, const CrossEntropyArgs& args) override;
  void add(Queue& queue, void* to, const void* from, int64_t numel, DType dtype) override;
  void narrow(Queue& queue, const float* from, void* to, int64_t numel, DType dtype) override;
  void sum_rows(Queue& queue, const void* from, float* to, int64_t rows, int64_t numel,
                DType dtype) override;
  size_t grad_norm_scratch_bytes(int64_t numel) const override;
  void round_grad(Queue& queue, const RoundGradArgs& args) override;
  void finish_norm(Queue& queue, const FinishNormArgs& args) override;
  void device_adam(Queue& queue, const DeviceAdamArgs& args) override;
  int64_t head_chunk_rows(int64_t vocab, DType dtype) const override;

 private:
  const Kernels& kernels(DType dtype) const { return kernels_of(kernels_, dtype); }
  void run_norm_backward(const NormBackwardArgs& args);
  void run_attention_forward(const AttentionArgs& args);
  void run_attention_backward(const AttentionBackwardArgs& args);
  int64_t attention_thread_floats(int64_t head_dim, int64_t max_sequence, bool backward) const;

  const KernelSet& kernels_;
  const std::unique_ptr<Matmul> matmul_;
  const int threads_;
  const Workspace workspace_;
};

}  // namespace orlop::host

#pragma once

#include <string>

#include "backend/ops.h"
#include "gpu/attention.h"
#include "gpu/matmul.h"

namespace orlop {

struct CudaOpsOptions {
  int device = 0;
  bool deterministic_attention = true;
  bool autotune = false;
  bool own_kernels_only = false;
};

// The operations on one device: cuBLASLt, cuDNN and the kernels of gpu/kernels. matmul,
// norm_backward and bias_backward use the workspace of their queue, which only the compute queue
// has.
class CudaOps final : public Ops {
 public:
  // The device is current.
  explicit CudaOps(const CudaOpsOptions& options);

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

  CublasMatmul& cublas() { return matmul_; }
  std::string attention_description() const { return attention_.description(); }

 private:
  int device_;
  bool own_kernels_only_;
  CublasMatmul matmul_;
  Attention attention_;
};

}  // namespace orlop

#pragma once

#include <memory>
#include <string>

#include "backend/ops.h"
#include "gpu/cuda_queue.h"

namespace orlop {

class AttentionBackend;

// Attention of one device: cuDNN's where it takes the shape, else the plain kernels. Which of them,
// and how cuDNN's work is cut, depends on the shape and the libraries alone.
class Attention {
 public:
  // `cudnn` from make_cudnn_attention(), or null: the plain kernels alone.
  explicit Attention(std::unique_ptr<AttentionBackend> cudnn);
  ~Attention();

  // "cuDNN 9.19.0" or "plain kernels": for logs and reports.
  std::string description() const;

  size_t workspace_bytes(const AttentionShape& shape) const;
  void forward(CudaQueue& queue, const AttentionArgs& args);
  void backward(CudaQueue& queue, const AttentionBackwardArgs& args);

 private:
  std::unique_ptr<AttentionBackend> cudnn_;
};

}  // namespace orlop

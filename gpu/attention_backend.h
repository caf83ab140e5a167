#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "backend/ops.h"
#include "gpu/cuda_queue.h"

namespace orlop {

// A library's attention. It may refuse a problem; the plain kernels take it then.
class AttentionBackend {
 public:
  virtual ~AttentionBackend() = default;

  virtual std::string description() const = 0;
  // Workspace of one call, or 0 when the shape is refused.
  virtual size_t workspace_bytes(const AttentionShape& shape) = 0;
  // False: refused, nothing was issued.
  virtual bool forward(CudaQueue& queue, const AttentionArgs& args) = 0;
  virtual bool backward(CudaQueue& queue, const AttentionBackwardArgs& args) = 0;
};

// Null, with one line in the log that says why, when cuDNN is not part of this build or not on this
// machine. The device is current.
std::unique_ptr<AttentionBackend> make_cudnn_attention(bool deterministic);

}  // namespace orlop

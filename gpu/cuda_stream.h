#pragma once

#include <cuda_runtime_api.h>

#include <utility>

#include "gpu/cuda_check.h"

namespace orlop {

// Owns one stream of the current device that does not wait for the legacy default stream.
class CudaStream {
 public:
  explicit CudaStream(int priority) {
    ORLOP_CUDA(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, priority));
  }
  CudaStream(CudaStream&& other) noexcept : stream_(std::exchange(other.stream_, nullptr)) {}
  CudaStream& operator=(CudaStream&& other) = delete;
  ~CudaStream() {
    if (stream_ != nullptr) log_cuda_error(cudaStreamDestroy(stream_), "cudaStreamDestroy");
  }

  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace orlop

#pragma once

#include <cuda_runtime_api.h>

#include "gpu/cuda_check.h"

namespace orlop {

// Makes `device` current for the calling thread and puts the former one back at the end: callers
// such as PyTorch keep a current device of their own.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    ORLOP_CUDA(cudaGetDevice(&former_));
    if (former_ == device) return;
    ORLOP_CUDA(cudaSetDevice(device));
    changed_ = true;
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  ~DeviceScope() {
    if (changed_) log_cuda_error(cudaSetDevice(former_), "cudaSetDevice");
  }

 private:
  int former_ = 0;
  bool changed_ = false;
};

}  // namespace orlop

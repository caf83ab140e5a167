#pragma once

#include <cuda_runtime_api.h>

#include "gpu/cuda_check.h"

namespace orlop::kernels {

// Has the current device load a kernel now, not with its first launch.
template <typename Kernel>
void load_kernel(Kernel* kernel) {
  cudaFuncAttributes attributes{};
  ORLOP_CUDA(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)));
}

}  // namespace orlop::kernels

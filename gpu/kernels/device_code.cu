#include "gpu/kernels/device_math.cuh"
#include "gpu/kernels/kernels.h"

namespace orlop::kernels {
namespace {

__global__ void probe_kernel() {}

}  // namespace

bool device_has_code(const char** reason) {
  cudaFuncAttributes attributes{};
  const cudaError_t result =
      cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(probe_kernel));
  if (result == cudaSuccess) return true;
  static_cast<void>(cudaGetLastError());
  *reason = cudaGetErrorString(result);
  return false;
}

}  // namespace orlop::kernels

#include "gpu/cuda_backend_api.h"

#include "gpu/cuda_backend.h"
#include "orlop/export.h"

extern "C" {

ORLOP_EXPORT orlop::Backend* orlop_make_cuda_backend(const orlop::CudaBackendOptions* options) {
  return new orlop::CudaBackend(*options);
}

ORLOP_EXPORT const char* orlop_cuda_version() { return ORLOP_VERSION; }

ORLOP_EXPORT void orlop_cuda_check_device(int32_t device) {
  static_cast<void>(orlop::check_cuda_device(device));
}

ORLOP_EXPORT int32_t orlop_cuda_device_count() { return orlop::cuda_device_count(); }
}

#include "gpu/cuda_backend_api.h"

#include "gpu/cuda_backend.h"
#include "gpu/cuda_devices.h"
#include "orlop/export.h"

extern "C" {

ORLOP_EXPORT orlop::Backend* orlop_make_cuda_backend(const orlop::CudaBackendOptions* options) {
  return new orlop::CudaBackend(*options);
}

ORLOP_EXPORT int32_t orlop_cuda_device_count() { return orlop::cuda_device_count(); }
}

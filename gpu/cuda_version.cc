#include "gpu/cuda_backend_api.h"
#include "orlop/export.h"

extern "C" ORLOP_EXPORT const char* orlop_cuda_version() { return ORLOP_VERSION; }

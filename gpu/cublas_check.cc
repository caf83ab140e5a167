#include "gpu/cublas_check.h"

#include <cuda_runtime_api.h>

#include "base/check.h"
#include "gpu/cuda_check.h"

namespace orlop {

void throw_cublas_error(cublasStatus_t result, const char* call, const char* file, int line) {
  static_cast<void>(cudaGetLastError());
  fail(ErrorCode::kDevice, "{} ({}:{}): {}: {}", call, base_name(file), line,
       cublasLtGetStatusName(result), cublasLtGetStatusString(result));
}

}  // namespace orlop

#pragma once

#include <cublasLt.h>

namespace orlop {

// As cuda_check.h, apart from it since what has nothing to do with matmuls loads without cuBLASLt.
[[noreturn]] void throw_cublas_error(cublasStatus_t result, const char* call, const char* file,
                                     int line);

inline void cublas_check(cublasStatus_t result, const char* call, const char* file, int line) {
  if (result != CUBLAS_STATUS_SUCCESS) [[unlikely]] {
    throw_cublas_error(result, call, file, line);
  }
}

}  // namespace orlop

#define ORLOP_CUBLAS(call) ::orlop::cublas_check((call), #call, __FILE__, __LINE__)

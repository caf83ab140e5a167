#pragma once

#include <cuda_runtime_api.h>

#include <string_view>

namespace orlop {

// Throws Error(kDevice), or Error(kOutOfMemory) for a refused allocation, that names the call, its
// place and the runtime's name and text of `result`. Takes the error back from the runtime, so that
// the next call does not report it again.
[[noreturn]] void throw_cuda_error(cudaError_t result, const char* call, const char* file,
                                   int line);
// "matmul.cc" of a path.
std::string_view base_name(std::string_view path);
// For destructors: one warning instead of an exception.
void log_cuda_error(cudaError_t result, const char* call) noexcept;

inline void cuda_check(cudaError_t result, const char* call, const char* file, int line) {
  if (result != cudaSuccess) [[unlikely]] {
    throw_cuda_error(result, call, file, line);
  }
}

}  // namespace orlop

#define ORLOP_CUDA(call) ::orlop::cuda_check((call), #call, __FILE__, __LINE__)
// After a kernel launch: reports a refused launch under the kernel's name.
#define ORLOP_CUDA_LAUNCHED(kernel) \
  ::orlop::cuda_check(cudaGetLastError(), "launch of " kernel, __FILE__, __LINE__)

#include "gpu/cuda_check.h"

#include "base/check.h"
#include "base/log.h"

namespace orlop {
namespace {

// After these the context is unusable and every later call reports them again.
bool is_sticky(cudaError_t result) {
  switch (result) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorECCUncorrectable:
      return true;
    default:
      return false;
  }
}

}  // namespace

std::string_view base_name(std::string_view path) {
  const size_t slash = path.rfind('/');
  return slash == std::string_view::npos ? path : path.substr(slash + 1);
}

void throw_cuda_error(cudaError_t result, const char* call, const char* file, int line) {
  static_cast<void>(cudaGetLastError());
  const ErrorCode code =
      result == cudaErrorMemoryAllocation ? ErrorCode::kOutOfMemory : ErrorCode::kDevice;
  fail(code, "{} ({}:{}): {}: {}{}", call, base_name(file), line, cudaGetErrorName(result),
       cudaGetErrorString(result),
       is_sticky(result) ? "; the device context is lost, start the process again" : "");
}

void log_cuda_error(cudaError_t result, const char* call) noexcept {
  if (result == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());
  try {
    log_warning("{}: {}: {}", call, cudaGetErrorName(result), cudaGetErrorString(result));
  } catch (...) {  // a destructor has nobody to tell
  }
}

}  // namespace orlop

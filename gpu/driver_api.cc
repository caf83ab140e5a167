#include "gpu/driver_api.h"

#include "base/check.h"
#include "gpu/cuda_check.h"

namespace orlop {
namespace {

template <typename Function>
Function find_driver_function(const char* name) {
  // The interface of CUDA 12.0, which these signatures follow.
  constexpr unsigned kInterfaceVersion = 12000;
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found{};
  ORLOP_CUDA(cudaGetDriverEntryPointByVersion(name, &address, kInterfaceVersion, cudaEnableDefault,
                                              &found));
  check(found == cudaDriverEntryPointSuccess && address != nullptr, ErrorCode::kDevice,
        "the NVIDIA driver has no {}; install a driver for CUDA 12 or newer", name);
  return reinterpret_cast<Function>(address);
}

}  // namespace

DriverApi::DriverApi()
    : wait_value32_(find_driver_function<WaitValue32>("cuStreamWaitValue32")),
      error_name_(find_driver_function<GetErrorName>("cuGetErrorName")) {}

void DriverApi::stream_wait_at_least(cudaStream_t stream, CUdeviceptr device_address,
                                     unsigned value) const {
  const CUresult result = wait_value32_(stream, device_address, value, CU_STREAM_WAIT_VALUE_GEQ);
  if (result == CUDA_SUCCESS) return;
  const char* name = nullptr;
  error_name_(result, &name);
  fail(ErrorCode::kDevice, "cuStreamWaitValue32 for version {}: {}", value,
       name != nullptr ? name : "unknown driver error");
}

}  // namespace orlop

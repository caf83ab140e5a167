#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace orlop {

// Functions of the driver itself, found at run time: the library does not link libcuda, so that it
// loads, and can say what is missing, on a machine without a driver.
class DriverApi {
 public:
  DriverApi();

  // Work issued to `stream` later waits until the 32-bit word at `device_address` is at least
  // `value` (compared as signed difference). Throws Error(kDevice).
  void stream_wait_at_least(cudaStream_t stream, CUdeviceptr device_address, unsigned value) const;

 private:
  using WaitValue32 = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned);
  using GetErrorName = CUresult (*)(CUresult, const char**);

  WaitValue32 wait_value32_ = nullptr;
  GetErrorName error_name_ = nullptr;
};

}  // namespace orlop

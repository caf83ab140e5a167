#include "gpu/cuda_devices.h"

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <string>

#include "base/check.h"
#include "gpu/cuda_check.h"

namespace orlop {
namespace {

std::string visible_devices() {
  const char* value = std::getenv("CUDA_VISIBLE_DEVICES");
  return value == nullptr ? std::string() : fmt::format(" (CUDA_VISIBLE_DEVICES is '{}')", value);
}

std::string cuda_version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

}  // namespace

int check_cuda_device(int32_t index) {
  int driver = 0;
  static_cast<void>(cudaDriverGetVersion(&driver));
  check(driver != 0, ErrorCode::kDevice,
        "no NVIDIA driver on this machine; use --device host, or install a driver for CUDA {}",
        cuda_version_text(CUDART_VERSION));
  int count = 0;
  const cudaError_t result = cudaGetDeviceCount(&count);
  static_cast<void>(cudaGetLastError());
  check(result != cudaErrorInsufficientDriver, ErrorCode::kDevice,
        "the NVIDIA driver supports CUDA {}, this build needs {}: install a newer driver",
        cuda_version_text(driver), cuda_version_text(CUDART_VERSION));
  check(result != cudaErrorNoDevice && !(result == cudaSuccess && count == 0), ErrorCode::kDevice,
        "no NVIDIA GPU is visible{}; use --device host", visible_devices());
  cuda_check(result, "cudaGetDeviceCount", __FILE__, __LINE__);
  check(index >= 0 && index < count, ErrorCode::kUsage,
        "device index {}: this process sees {} GPU{}, indices 0 to {}{}", index, count,
        count == 1 ? "" : "s", count - 1, visible_devices());
  return index;
}

int cuda_device_count() noexcept {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  static_cast<void>(cudaGetLastError());
  return 0;
}

}  // namespace orlop

#include "gpu/device_memory_meter.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include "gpu/cuda_check.h"

namespace orlop {
namespace {

// The part of NVML's stable interface that is used; its header is not part of every toolkit.
constexpr int kNvmlSuccess = 0;
struct NvmlMemory {
  unsigned long long total;
  unsigned long long free;
  unsigned long long used;
};
using NvmlInit = int (*)();
using NvmlShutdown = int (*)();
using NvmlDeviceByPciBusId = int (*)(const char*, void**);
using NvmlDeviceMemory = int (*)(void*, NvmlMemory*);

template <typename Function>
Function symbol(void* library, const char* name) {
  return reinterpret_cast<Function>(dlsym(library, name));
}

}  // namespace

DeviceMemoryMeter::DeviceMemoryMeter(int device) {
  char bus_id[32] = {};
  ORLOP_CUDA(cudaDeviceGetPCIBusId(bus_id, sizeof(bus_id), device));
  void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return;
  const auto init = symbol<NvmlInit>(library, "nvmlInit_v2");
  const auto by_bus_id = symbol<NvmlDeviceByPciBusId>(library, "nvmlDeviceGetHandleByPciBusId_v2");
  if (init == nullptr || by_bus_id == nullptr || init() != kNvmlSuccess) {
    dlclose(library);
    return;
  }
  library_ = library;
  if (by_bus_id(bus_id, &nvml_device_) != kNvmlSuccess) nvml_device_ = nullptr;
}

DeviceMemoryMeter::~DeviceMemoryMeter() {
  if (library_ == nullptr) return;
  if (const auto shutdown = symbol<NvmlShutdown>(library_, "nvmlShutdown")) shutdown();
  dlclose(library_);
}

std::optional<size_t> DeviceMemoryMeter::free_bytes() const {
  if (nvml_device_ == nullptr) return std::nullopt;
  const auto read = symbol<NvmlDeviceMemory>(library_, "nvmlDeviceGetMemoryInfo");
  NvmlMemory memory{};
  if (read == nullptr || read(nvml_device_, &memory) != kNvmlSuccess) return std::nullopt;
  return static_cast<size_t>(memory.free);
}

}  // namespace orlop

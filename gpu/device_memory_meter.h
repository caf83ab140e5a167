#pragma once

#include <cstddef>
#include <optional>

namespace orlop {

// Memory of one device as nvidia-smi shows it, read through NVML without creating a context. NVML
// is part of the driver and loaded at run time; without it free_bytes() is empty.
class DeviceMemoryMeter {
 public:
  explicit DeviceMemoryMeter(int device);
  DeviceMemoryMeter(const DeviceMemoryMeter&) = delete;
  DeviceMemoryMeter& operator=(const DeviceMemoryMeter&) = delete;
  ~DeviceMemoryMeter();

  std::optional<size_t> free_bytes() const;

 private:
  void* library_ = nullptr;
  void* nvml_device_ = nullptr;
};

}  // namespace orlop

#pragma once

#include <cstdint>

namespace orlop {

// Devices that the process sees; 0 without a GPU or a usable driver.
int cuda_device_count() noexcept;

// Looks at everything that can be wrong with a device before it has a context: the driver, its
// version, the index. Returns the index as the runtime takes it; throws Error(kDevice), or
// Error(kUsage) for the index.
int check_cuda_device(int32_t index);

}  // namespace orlop

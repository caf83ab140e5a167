#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace orlop {

inline constexpr size_t kKiB = size_t{1} << 10;
inline constexpr size_t kMiB = size_t{1} << 20;
inline constexpr size_t kGiB = size_t{1} << 30;

// Alignment of every device buffer and of every tensor group in a FlatParam, in bytes. Matmul
// algorithms are filtered by pointer alignment, so one fixed value keeps the bits independent of
// placement.
inline constexpr size_t kDeviceAlignment = 256;

constexpr size_t align_up(size_t value, size_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

constexpr int64_t ceil_div(int64_t value, int64_t divisor) {
  return (value + divisor - 1) / divisor;
}

// "1.50 GiB", "312 MiB", "17 B".
std::string format_bytes(size_t bytes);

// Accepts "24GiB", "24 GB", "512M", "1.5GiB", "4096"; GB is 1e9, GiB and G are 2^30. `what` names
// the field in the error. Throws Error(kUsage).
size_t parse_bytes(std::string_view text, std::string_view what);

}  // namespace orlop

#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "orlop/drives.h"

namespace orlop::nvme {

// Bytes that are free on the file systems of the directories, each file system counted once. A
// directory that does not exist yet counts as the nearest one above it. Throws Error(kUsage).
uint64_t free_disk_bytes(std::span<const std::string> directories);

}  // namespace orlop::nvme

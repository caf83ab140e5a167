#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "nvme/io_backend.h"
#include "nvme/io_queue.h"
#include "orlop/drives.h"

namespace orlop::nvme {

// Moves all of `memory` to or from `fd` at `offset` through `queue` and returns GiB/s. Memory,
// offset and length as the file's direct I/O wants them.
double measure_bandwidth(IoQueue& queue, IoOp op, int fd, uint64_t offset,
                         std::span<std::byte> memory);

}  // namespace orlop::nvme

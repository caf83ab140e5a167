#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "nvme/io_backend.h"
#include "nvme/io_queue.h"

namespace orlop::nvme {

// Moves all of `memory` to or from `fd` at `offset` through `queue` and returns GiB/s. Memory,
// offset and length as the file's direct I/O wants them.
double measure_bandwidth(IoQueue& queue, IoOp op, int fd, uint64_t offset,
                         std::span<std::byte> memory);

struct SweepOptions {
  std::string directory;
  size_t file_bytes = size_t{256} << 20;
  std::vector<size_t> block_bytes = {256 << 10, 1 << 20, 4 << 20};
  std::vector<unsigned> depths = {4, 16, 32};
  int repeats = 3;  // of every point; the median counts
  IoEngine engine = IoEngine::kAuto;
  bool direct = true;
};

struct SweepPoint {
  size_t block_bytes = 0;
  unsigned depth = 0;
  double read_gib_per_s = 0;
  double write_gib_per_s = 0;
};

struct SweepResult {
  std::vector<SweepPoint> points;  // in the order of the options
  SweepPoint best;      // the least depth, then the least block, within 3 % of the fastest
  std::string backend;  // "io_uring" or "threads"
  bool direct = false;
};

// Measures reads and writes of one temporary file in the directory by block size and depth and
// picks the point for nvme.block and nvme.queue_depth. The file is removed. Throws Error(kUsage,
// kIo) or Error(kDoesNotFit).
SweepResult sweep_aio(const SweepOptions& options);

}  // namespace orlop::nvme

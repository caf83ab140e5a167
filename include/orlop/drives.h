#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "orlop/export.h"

namespace orlop {

// What `orlop doctor` tells about a swap directory.
struct DriveReport {
  std::string directory;
  std::string file_system;
  std::string device;  // "nvme0n1", "vda"; empty when the file system has none
  bool direct = false;
  std::string why_not_direct;
  uint64_t free_bytes = 0;
  uint64_t total_bytes = 0;
  std::optional<int> percent_worn;  // of the drive's rated writes, where the drive tells
};

// Looks at an existing directory that can be written; leaves nothing behind. Throws Error(kUsage).
ORLOP_EXPORT DriveReport report_drive(const std::string& directory);

// What the kernel grants swapping here.
struct IoReport {
  std::string engine;                     // what nvme.engine: auto takes, "io_uring" or "threads"
  std::string reason;                     // why it is not io_uring
  std::optional<uint64_t> memlock_bytes;  // limit of locked memory; empty when there is none
};

ORLOP_EXPORT IoReport report_io();

struct SweepOptions {
  std::string directory;
  size_t file_bytes = size_t{256} << 20;
  std::vector<size_t> block_bytes = {256 << 10, 1 << 20, 4 << 20};
  std::vector<unsigned> depths = {4, 16, 32};
  int repeats = 3;              // of every point; the median counts
  std::string engine = "auto";  // "auto", "io_uring" or "threads"
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
ORLOP_EXPORT SweepResult sweep_aio(const SweepOptions& options);

}  // namespace orlop

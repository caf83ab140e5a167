#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace orlop::nvme {

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
DriveReport report_drive(const std::string& directory);

// Bytes that are free on the file systems of the directories, each file system counted once. A
// directory that does not exist yet counts as the nearest one above it. Throws Error(kUsage).
uint64_t free_disk_bytes(std::span<const std::string> directories);

// What the kernel grants swapping here.
struct IoReport {
  std::string engine;                     // what nvme.engine: auto takes, "io_uring" or "threads"
  std::string reason;                     // why it is not io_uring
  std::optional<uint64_t> memlock_bytes;  // limit of locked memory; empty when there is none
};

IoReport report_io();

}  // namespace orlop::nvme

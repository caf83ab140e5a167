#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace orlop::nvme {

// How one open file takes direct I/O. Asked of every file, never remembered for another: two mounts
// may answer differently.
struct DirectIo {
  bool direct = false;          // O_DIRECT is set on the file
  size_t memory_alignment = 1;  // of buffers, bytes; 1 when not direct
  size_t offset_alignment = 1;  // of offsets and lengths, bytes; 1 when not direct
  std::string why_not;          // empty when direct
  bool in_memory = false;       // the file system lives in RAM
};

// Sets O_DIRECT on `fd` where its file system takes it.
DirectIo enable_direct_io(int fd);
// Takes O_DIRECT off again, for a file system that accepts the flag and refuses the transfers.
DirectIo disable_direct_io(int fd, std::string why);

// "ext4", "xfs", "tmpfs", ... of an open file, or its magic number.
std::string file_system_name(int fd);

// Expands a leading "~/" and makes the path absolute.
std::string absolute_path(const std::string& path);

// pread / pwrite of everything, for set-up and tests of a file. Throws Error(kIo) naming `path`.
void read_fully(int fd, void* data, size_t bytes, uint64_t offset, const std::string& path);
void write_fully(int fd, const void* data, size_t bytes, uint64_t offset, const std::string& path);

}  // namespace orlop::nvme

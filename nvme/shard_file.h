#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "base/owner_process.h"
#include "base/unique_fd.h"
#include "nvme/direct_io.h"
#include "nvme/superblock.h"

namespace orlop::nvme {

struct ShardFileOptions {
  std::string directory;  // created when missing; "~/" is expanded
  int rank = 0;
  // The same for all ranks of a run: their files may share a directory. Any other living owner of a
  // file there is a second engine, and the start is refused.
  std::string run_id;
  bool direct = true;  // try O_DIRECT
};

// The swap file of one rank on one drive, "orlop-r<rank>.swap". It is held by an exclusive lock,
// which ends with the process, so a file that nobody holds is a leftover of a dead run and is
// removed.
class ShardFile {
 public:
  // Makes the directory, refuses a second engine, removes leftovers and creates the file. Throws
  // Error(kUsage) or Error(kIo) naming the path and the reason.
  explicit ShardFile(const ShardFileOptions& options);
  // Removes the file unless keep() was called, and those of ranks of the same run that were killed.
  // Never throws; does nothing in a forked child.
  ~ShardFile();
  ShardFile(const ShardFile&) = delete;
  ShardFile& operator=(const ShardFile&) = delete;

  // Allocates every block of a file with `extents_bytes` from `extents_offset` on (both multiples
  // of the alignment) and a table of `records`. Throws Error(kDoesNotFit) with the bytes missing.
  void reserve(uint64_t extents_offset, uint64_t extents_bytes, uint64_t records);

  // Leaves the file at exit, until the next run in the same directory; the table tells what it
  // holds. `records` as many as reserved.
  void keep(std::span<const ChunkRecord> records, uint32_t checksum_kind);

  // Throws Error(kIo) when the file no longer has the length that reserve() gave it.
  void check_length() const;

  int fd() const { return fd_.get(); }
  const std::string& path() const { return path_; }
  bool direct() const { return io_.direct; }
  const DirectIo& direct_io() const { return io_; }
  // Of extents and of the memory that they are read into, bytes: 4096, or more where the drive
  // asks.
  size_t alignment() const { return alignment_; }
  uint64_t file_bytes() const { return superblock_.file_bytes; }

 private:
  void create(const std::string& directory);
  void write_superblock();

  const OwnerProcess owner_;
  bool kept_ = false;
  std::string path_;
  UniqueFd fd_;
  DirectIo io_;
  size_t alignment_ = kSuperblockBytes;
  Superblock superblock_;
};

// Bytes that swap files of dead runs take in the directories: the next engine there removes them.
// Throws Error(kUsage) for a directory that is there and cannot be read.
uint64_t leftover_swap_bytes(std::span<const std::string> directories);

// Identifies this process for ShardFileOptions::run_id when it is a run of its own.
std::string default_run_id();

}  // namespace orlop::nvme

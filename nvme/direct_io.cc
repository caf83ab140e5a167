#include "nvme/direct_io.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "base/check.h"

namespace orlop::nvme {
namespace {

constexpr long kXfsMagic = 0x58465342;
constexpr long kZfsMagic = 0x2fc12fc1;
constexpr long kRamfsMagic = 0x858458f6;
constexpr long kFuseMagic = 0x65735546;
constexpr size_t kUsualAlignment = 4096;

long file_system_magic(int fd) {
  struct statfs info {};
  return ::fstatfs(fd, &info) == 0 ? static_cast<long>(info.f_type) : 0;
}

bool set_flag(int fd, bool direct) {
  const int flags = ::fcntl(fd, F_GETFL);
  return flags >= 0 && ::fcntl(fd, F_SETFL, direct ? flags | O_DIRECT : flags & ~O_DIRECT) == 0;
}

}  // namespace

DirectIo enable_direct_io(int fd) {
  DirectIo io;
  const long magic = file_system_magic(fd);
  io.in_memory = magic == TMPFS_MAGIC || magic == kRamfsMagic;
  if (io.in_memory) {
    // Newer kernels take the flag here and none of its rules, which says nothing about a drive.
    io.why_not = fmt::format("{} lives in memory", file_system_name(fd));
    return io;
  }
  io.memory_alignment = io.offset_alignment = kUsualAlignment;
#ifdef STATX_DIOALIGN
  struct statx info {};
  if (::statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &info) == 0 &&
      (info.stx_mask & STATX_DIOALIGN) != 0) {
    if (info.stx_dio_offset_align == 0) {
      return disable_direct_io(
          fd, fmt::format("{} has no direct I/O for this file", file_system_name(fd)));
    }
    io.memory_alignment = std::max<size_t>(info.stx_dio_mem_align, 1);
    io.offset_alignment = info.stx_dio_offset_align;
  }
#endif
  if (!set_flag(fd, true)) {
    return disable_direct_io(
        fd, fmt::format("{} refuses O_DIRECT: {}", file_system_name(fd), errno_text(errno)));
  }
  io.direct = true;
  return io;
}

DirectIo disable_direct_io(int fd, std::string why) {
  set_flag(fd, false);
  DirectIo io;
  io.why_not = std::move(why);
  return io;
}

std::string file_system_name(int fd) {
  switch (const long magic = file_system_magic(fd)) {
    case EXT4_SUPER_MAGIC:
      return "ext4";
    case BTRFS_SUPER_MAGIC:
      return "btrfs";
    case F2FS_SUPER_MAGIC:
      return "f2fs";
    case NFS_SUPER_MAGIC:
      return "nfs";
    case OVERLAYFS_SUPER_MAGIC:
      return "overlay";
    case TMPFS_MAGIC:
      return "tmpfs";
    case kXfsMagic:
      return "xfs";
    case kZfsMagic:
      return "zfs";
    case kRamfsMagic:
      return "ramfs";
    case kFuseMagic:
      return "fuse";
    default:
      return fmt::format("file system {:#x}", magic);
  }
}

std::string absolute_path(const std::string& path) {
  check(!path.empty(), ErrorCode::kUsage, "an empty path was given");
  const char* home = std::getenv("HOME");
  const bool in_home = path == "~" || path.starts_with("~/");
  check(!in_home || home, ErrorCode::kUsage, "{}: HOME is not set; give an absolute path", path);
  return std::filesystem::absolute(in_home ? home + path.substr(1) : path)
      .lexically_normal()
      .string();
}

void read_fully(int fd, void* data, size_t bytes, uint64_t offset, const std::string& path) {
  auto* to = static_cast<std::byte*>(data);
  for (size_t done = 0; done < bytes;) {
    const ssize_t moved = ::pread(fd, to + done, bytes - done, static_cast<off_t>(offset + done));
    if (moved < 0 && errno == EINTR) continue;
    check(moved >= 0, ErrorCode::kIo, "read of {} bytes at offset {} of {} failed: {}",
          bytes - done, offset + done, path, errno_text(errno));
    check(moved > 0, ErrorCode::kIo, "read of {} bytes at offset {} of {} met the end of the file",
          bytes - done, offset + done, path);
    done += static_cast<size_t>(moved);
  }
}

void write_fully(int fd, const void* data, size_t bytes, uint64_t offset, const std::string& path) {
  const auto* from = static_cast<const std::byte*>(data);
  for (size_t done = 0; done < bytes;) {
    const ssize_t moved =
        ::pwrite(fd, from + done, bytes - done, static_cast<off_t>(offset + done));
    if (moved < 0 && errno == EINTR) continue;
    check(moved > 0, ErrorCode::kIo, "write of {} bytes at offset {} of {} failed: {}",
          bytes - done, offset + done, path, errno_text(moved < 0 ? errno : ENOSPC));
    done += static_cast<size_t>(moved);
  }
}

}  // namespace orlop::nvme

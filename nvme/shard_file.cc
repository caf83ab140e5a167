#include "nvme/shard_file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <thread>

#include "base/bytes.h"
#include "base/check.h"
#include "base/log.h"
#include "nvme/aligned_memory.h"

namespace orlop::nvme {
namespace {

constexpr std::string_view kPrefix = "orlop-r";
constexpr std::string_view kSuffix = ".swap";
constexpr auto kSetUpLimit = std::chrono::seconds(30);
// From the end of a process until the kernel has closed its files, transfers under way included.
constexpr auto kClosingLimit = std::chrono::seconds(2);

std::string file_name(int rank) { return fmt::format("{}{}{}", kPrefix, rank, kSuffix); }

// Empty for a name that is no swap file's.
std::optional<int> rank_of(std::string_view name) {
  if (!name.starts_with(kPrefix) || !name.ends_with(kSuffix)) return std::nullopt;
  name.remove_prefix(kPrefix.size());
  name.remove_suffix(kSuffix.size());
  int rank = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), rank);
  if (error != std::errc{} || end != name.data() + name.size()) return std::nullopt;
  return rank;
}

void make_directory(const std::string& directory) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  check(!error && std::filesystem::is_directory(directory), ErrorCode::kUsage,
        "cannot use {} for swap: {}; choose another directory with --nvme", directory,
        error ? error.message() : "it is not a directory");
}

// Held while files are made and removed, so that ranks which start together do not see half a file.
class SetUpLock {
 public:
  explicit SetUpLock(const std::string& directory)
      : fd_(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
    check(static_cast<bool>(fd_), ErrorCode::kUsage, "cannot open {} for swap: {}", directory,
          errno_text(errno));
    const auto give_up = std::chrono::steady_clock::now() + kSetUpLimit;
    while (::flock(fd_.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK && errno != EINTR) return;  // no locks on directories here
      check(std::chrono::steady_clock::now() < give_up, ErrorCode::kUsage,
            "{} is locked by another process for more than {} s; choose another directory with "
            "--nvme",
            directory, kSetUpLimit.count());
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }

 private:
  UniqueFd fd_;
};

// Of a file that was found in the directory.
struct FoundFile {
  Superblock superblock;
  ssize_t got = 0;      // bytes of it
  bool sound = false;   // it is a superblock
  bool locked = false;  // somebody holds the file
  ProcessIdentity owner;

  // A forked child of a dead engine may still hold the lock: it never writes.
  bool is_dead() const { return !locked || (sound && liveness(owner) == Liveness::kDead); }
};

FoundFile look_at(const UniqueFd& fd) {
  FoundFile found;
  found.got = ::pread(fd.get(), &found.superblock, sizeof found.superblock, 0);
  found.sound = found.got == sizeof found.superblock && is_sound(found.superblock);
  found.locked = ::flock(fd.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  if (found.sound) found.owner = owner_of(found.superblock);
  return found;
}

// A file that was found in the directory: removes it when its owner is gone, throws when it belongs
// to another engine, leaves it alone when it belongs to another rank of this run.
void settle_found_file(const std::string& path, int found_rank, const ShardFileOptions& options) {
  const UniqueFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
  if (!fd && errno == ENOENT) return;
  check(
      static_cast<bool>(fd), ErrorCode::kUsage,
      "cannot open {}, which an earlier run left behind: {}; remove it or choose another directory",
      path, errno_text(errno));
  const FoundFile found = look_at(fd);
  const Superblock& superblock = found.superblock;
  if (!found.locked && !found.sound) {
    const Superblock blank{};
    const bool never_used = found.got == 0 || (found.got == sizeof superblock &&
                                               std::memcmp(&superblock, &blank, sizeof blank) == 0);
    check(
        never_used, ErrorCode::kUsage,
        "{} is not a swap file of this version, or its first block is damaged; remove it or choose "
        "another directory with --nvme",
        path);
  }
  const ProcessIdentity& owner = found.owner;
  if (!found.is_dead()) {
    const bool same_run = found.sound && run_id_of(superblock) == options.run_id;
    if (same_run && found_rank != options.rank) return;
    fail(
        ErrorCode::kUsage,
        "cannot use {} for swap: process {} on {} (rank {}) swaps to {}; give every engine its own "
        "directory with --nvme",
        options.directory, owner.pid, owner.host, found_rank, path);
  }
  check(::unlink(path.c_str()) == 0 || errno == ENOENT, ErrorCode::kUsage, "cannot remove {}: {}",
        path, errno_text(errno));
  log_info("removed {} ({}), which process {} left behind", path,
           format_bytes(static_cast<size_t>(superblock.file_bytes)), owner.pid);
}

struct CloseDirectory {
  void operator()(DIR* entries) const { ::closedir(entries); }
};

// Calls `visit(path, rank)` for every swap file.
template <typename Visit>
void for_swap_files(const std::string& directory, const Visit& visit) {
  const std::unique_ptr<DIR, CloseDirectory> entries(::opendir(directory.c_str()));
  check(entries != nullptr, ErrorCode::kUsage, "cannot read {}: {}", directory, errno_text(errno));
  while (const dirent* entry = ::readdir(entries.get())) {
    if (const std::optional<int> rank = rank_of(entry->d_name)) {
      visit(fmt::format("{}/{}", directory, entry->d_name), *rank);
    }
  }
}

// Removes the file of a rank of this run that was killed: no next run may come for a long time, and
// its bytes are taken until then.
void remove_abandoned(const std::string& path, const std::string& run_id) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  Superblock superblock;
  if (!fd || ::pread(fd.get(), &superblock, sizeof superblock, 0) != sizeof superblock) return;
  if (!is_sound(superblock) || superblock.state != Superblock::kInUse) return;
  if (run_id_of(superblock) != run_id) return;
  const ProcessIdentity owner = owner_of(superblock);
  const auto give_up = std::chrono::steady_clock::now() + kClosingLimit;
  while (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    if (liveness(owner) == Liveness::kDead) break;
    if (!is_ending(owner) || std::chrono::steady_clock::now() > give_up) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  if (::unlink(path.c_str()) != 0) return;
  log_info("removed {} ({}) of rank {}, which has ended without doing so", path,
           format_bytes(static_cast<size_t>(superblock.file_bytes)), superblock.rank);
}

void remove_those_of_dead_ranks(const std::string& directory, const std::string& run_id) noexcept {
  try {
    const SetUpLock lock(directory);
    for_swap_files(directory,
                   [&](const std::string& path, int) { remove_abandoned(path, run_id); });
  } catch (const std::exception& error) {
    log_warning("cannot look for swap files of ranks that were killed: {}", error.what());
  }
}

}  // namespace

uint64_t leftover_swap_bytes(std::span<const std::string> directories) {
  uint64_t bytes = 0;
  for (const std::string& name : directories) {
    const std::string directory = absolute_path(name);
    std::error_code error;
    if (!std::filesystem::is_directory(directory, error)) continue;
    const SetUpLock lock(directory);
    for_swap_files(directory, [&](const std::string& path, int) {
      const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
      struct stat file {};
      if (!fd || ::fstat(fd.get(), &file) != 0) return;
      const FoundFile found = look_at(fd);
      if (found.sound && found.is_dead()) bytes += static_cast<uint64_t>(file.st_blocks) * 512;
    });
  }
  return bytes;
}

ShardFile::ShardFile(const ShardFileOptions& options) {
  ShardFileOptions resolved = options;
  resolved.directory = absolute_path(options.directory);
  make_directory(resolved.directory);
  const SetUpLock lock(resolved.directory);
  for_swap_files(resolved.directory, [&](const std::string& path, int rank) {
    settle_found_file(path, rank, resolved);
  });
  path_ = fmt::format("{}/{}", resolved.directory, file_name(options.rank));
  superblock_ = make_superblock(this_process(), options.rank, options.run_id);
  create(resolved.directory);
  try {
    if (options.direct) {
      io_ = enable_direct_io(fd());
    } else {
      io_.why_not = "nvme.direct is off";
    }
    alignment_ = std::max({kSuperblockBytes, io_.offset_alignment, io_.memory_alignment});
    write_superblock();
  } catch (...) {
    ::unlink(path_.c_str());
    throw;
  }
  if (io_.in_memory) {
    log_warning("{} lives in memory: swapping there uses RAM, not a drive", resolved.directory);
  } else if (!io_.direct && options.direct) {
    log_warning("{}: reads and writes go through the page cache: {}", path_, io_.why_not);
  }
}

ShardFile::~ShardFile() {
  if (!owner_.is_this() || kept_) return;
  struct stat ours {};
  struct stat there {};
  const bool same = ::fstat(fd(), &ours) == 0 && ::stat(path_.c_str(), &there) == 0 &&
                    ours.st_dev == there.st_dev && ours.st_ino == there.st_ino;
  if (same && ::unlink(path_.c_str()) != 0) {
    log_warning("cannot remove {}: {}", path_, errno_text(errno));
  }
  if (same) {
    const std::string directory = std::filesystem::path(path_).parent_path().string();
    remove_those_of_dead_ranks(directory, run_id_of(superblock_));
  }
}

void ShardFile::create(const std::string& directory) {
  fd_.reset(::open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  check(static_cast<bool>(fd_), ErrorCode::kUsage,
        "cannot create a swap file in {}: {}; choose a directory that can be written with --nvme",
        directory, errno_text(errno));
  if (::flock(fd(), LOCK_EX | LOCK_NB) != 0) {
    const int error = errno;
    ::unlink(path_.c_str());
    fail(ErrorCode::kUsage, "cannot lock {}: {}; choose a directory on a file system with locks",
         path_, errno_text(error));
  }
}

void ShardFile::write_superblock() {
  seal(superblock_);
  const AlignedMemory block(alignment_, alignment_);
  std::memcpy(block.data(), &superblock_, sizeof superblock_);
  if (io_.direct && ::pwrite(fd(), block.data(), alignment_, 0) < 0 && errno == EINVAL) {
    io_ = disable_direct_io(fd(), fmt::format("{} takes O_DIRECT but refuses an aligned write",
                                              file_system_name(fd())));
  }
  write_fully(fd(), block.data(), alignment_, 0, path_);
}

void ShardFile::reserve(uint64_t extents_offset, uint64_t extents_bytes, uint64_t records) {
  ORLOP_INVARIANT(extents_offset >= alignment_ && extents_offset % alignment_ == 0);
  superblock_.extents_offset = extents_offset;
  superblock_.table_offset = extents_offset + extents_bytes;
  superblock_.table_records = records;
  superblock_.file_bytes =
      align_up(superblock_.table_offset + records * sizeof(ChunkRecord), alignment_);

  struct stat file {};
  struct statvfs space {};
  check(::fstat(fd(), &file) == 0 && ::fstatvfs(fd(), &space) == 0, ErrorCode::kIo,
        "cannot look at {}: {}", path_, errno_text(errno));
  if (static_cast<uint64_t>(file.st_size) > file_bytes()) {
    check(::ftruncate(fd(), static_cast<off_t>(file_bytes())) == 0, ErrorCode::kIo,
          "cannot shorten {} to {} bytes: {}", path_, file_bytes(), errno_text(errno));
  }
  const uint64_t taken = std::min(static_cast<uint64_t>(file.st_blocks) * 512, file_bytes());
  const uint64_t needed = file_bytes() - taken;
  const uint64_t free = static_cast<uint64_t>(space.f_bavail) * space.f_frsize;
  const int flags = ::fcntl(fd(), F_GETFL);
  int error = needed > free ? ENOSPC : 0;
  if (error == 0) {
    // The C library may have to write single bytes where the file system cannot allocate.
    ::fcntl(fd(), F_SETFL, flags & ~O_DIRECT);
    do {
      error = ::posix_fallocate(fd(), 0, static_cast<off_t>(file_bytes()));
    } while (error == EINTR);
    ::fcntl(fd(), F_SETFL, flags);
  }
  if (error != 0) {
    const uint64_t missing = needed > free ? needed - free : needed;
    fail(error == ENOSPC || error == EDQUOT ? ErrorCode::kDoesNotFit : ErrorCode::kIo,
         "{} needs {} bytes more ({}), {} bytes are free there: {} bytes are missing ({}); free "
         "space, add a directory with --nvme or lower limits.nvme",
         path_, needed, format_bytes(needed), free, missing, errno_text(error));
  }
  write_superblock();
}

void ShardFile::keep(std::span<const ChunkRecord> records, uint32_t checksum_kind) {
  ORLOP_INVARIANT(records.size() == superblock_.table_records);
  const size_t bytes = file_bytes() - superblock_.table_offset;
  if (bytes > 0) {
    const AlignedMemory table(bytes, alignment_);
    if (!records.empty()) std::memcpy(table.data(), records.data(), records.size_bytes());
    write_fully(fd(), table.data(), bytes, superblock_.table_offset, path_);
  }
  check(::fdatasync(fd()) == 0, ErrorCode::kIo, "fdatasync of {} failed: {}", path_,
        errno_text(errno));
  superblock_.table_checksum = table_checksum(records);
  superblock_.checksum_kind = checksum_kind;
  superblock_.state = Superblock::kKept;
  write_superblock();
  kept_ = true;
  check(::fdatasync(fd()) == 0, ErrorCode::kIo, "fdatasync of {} failed: {}", path_,
        errno_text(errno));
}

void ShardFile::check_length() const {
  struct stat file {};
  check(::fstat(fd(), &file) == 0, ErrorCode::kIo, "fstat of {} failed: {}", path_,
        errno_text(errno));
  check(static_cast<uint64_t>(file.st_size) == file_bytes(), ErrorCode::kIo,
        "{} has {} bytes, {} are expected: something else changed the swap file; its contents are "
        "lost",
        path_, file.st_size, file_bytes());
}

std::string default_run_id() {
  const ProcessIdentity self = this_process();
  return fmt::format("{}-{}-{}", self.boot_id.substr(0, 8), self.pid, self.start_ticks);
}

}  // namespace orlop::nvme

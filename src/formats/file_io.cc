#include "formats/file_io.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>

#include "base/bytes.h"
#include "base/check.h"

namespace orlop {
namespace {

namespace fs = std::filesystem;

// Linux moves at most 2 GiB less a page per call.
constexpr size_t kMaxTransferBytes = kGiB;

std::string free_space_text(const fs::path& path) {
  std::error_code error;
  const fs::space_info space = fs::space(path, error);
  if (error) return "free space unknown";
  return fmt::format("{} ({} bytes) free", format_bytes(space.available), space.available);
}

UniqueFd open_file(const fs::path& path, int flags, const char* purpose) {
  int fd = -1;
  do {
    fd = ::open(path.c_str(), flags | O_CLOEXEC, 0666);
  } while (fd < 0 && errno == EINTR);
  if (fd < 0) {
    fail(ErrorCode::kIo, "cannot open '{}' for {}: {}", path.string(), purpose, errno_text(errno));
  }
  return UniqueFd(fd);
}

}  // namespace

// A pipe is refused by whoever asks for its size; opening it waits for nobody.
UniqueFd open_for_reading(const fs::path& path) {
  return open_file(path, O_RDONLY | O_NONBLOCK, "reading");
}

UniqueFd open_for_writing(const fs::path& path) {
  return open_file(path, O_RDWR | O_CREAT | O_TRUNC, "writing");
}

size_t file_bytes(const UniqueFd& fd, const fs::path& path) {
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) {
    fail(ErrorCode::kIo, "cannot stat '{}': {}", path.string(), errno_text(errno));
  }
  check(S_ISREG(status.st_mode), ErrorCode::kInvalidData, "'{}' is not a regular file",
        path.string());
  return static_cast<size_t>(status.st_size);
}

void read_at(const UniqueFd& fd, const fs::path& path, size_t offset, std::span<std::byte> out) {
  const size_t wanted = out.size();
  const size_t begin = offset;
  while (!out.empty()) {
    const ssize_t moved = ::pread(fd.get(), out.data(), std::min(out.size(), kMaxTransferBytes),
                                  static_cast<off_t>(offset));
    if (moved < 0) {
      if (errno == EINTR) continue;
      fail(ErrorCode::kIo, "cannot read {} bytes at offset {} of '{}': {}", wanted, begin,
           path.string(), errno_text(errno));
    }
    check(moved > 0, ErrorCode::kInvalidData,
          "'{}' ends at byte {}, but {} bytes at offset {} were expected", path.string(), offset,
          wanted, begin);
    offset += static_cast<size_t>(moved);
    out = out.subspan(static_cast<size_t>(moved));
  }
}

void write_at(const UniqueFd& fd, const fs::path& path, size_t offset,
              std::span<const std::byte> bytes) {
  const size_t wanted = bytes.size();
  const size_t begin = offset;
  while (!bytes.empty()) {
    const ssize_t moved =
        ::pwrite(fd.get(), bytes.data(), std::min(bytes.size(), kMaxTransferBytes),
                 static_cast<off_t>(offset));
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) {
      const int error = moved < 0 ? errno : EIO;
      fail(ErrorCode::kIo,
           "cannot write {} ({} bytes) at offset {} of '{}': {}; {} bytes were written, {}",
           format_bytes(wanted), wanted, begin, path.string(), errno_text(error), offset - begin,
           free_space_text(path));
    }
    offset += static_cast<size_t>(moved);
    bytes = bytes.subspan(static_cast<size_t>(moved));
  }
}

void reserve_space(const UniqueFd& fd, const fs::path& path, size_t bytes) {
  if (bytes == 0) return;
  int result = 0;
  do {
    result = ::fallocate(fd.get(), 0, 0, static_cast<off_t>(bytes));
  } while (result != 0 && errno == EINTR);
  if (result != 0 && errno != EOPNOTSUPP && errno != ENOSYS) {
    fail(ErrorCode::kIo, "cannot reserve {} ({} bytes) for '{}': {}; {}", format_bytes(bytes),
         bytes, path.string(), errno_text(errno), free_space_text(path));
  }
}

void sync_file(const UniqueFd& fd, const fs::path& path) {
  if (::fsync(fd.get()) != 0) {
    fail(ErrorCode::kIo, "cannot bring '{}' to stable storage: {}; {}", path.string(),
         errno_text(errno), free_space_text(path));
  }
}

void sync_folder(const fs::path& folder) {
  const fs::path named = folder.empty() ? fs::path(".") : folder;
  const UniqueFd fd = open_file(named, O_RDONLY | O_DIRECTORY, "syncing");
  // Some network file systems cannot sync a folder and say so by EINVAL; there it is a no-op.
  if (::fsync(fd.get()) != 0 && errno != EINVAL) {
    fail(ErrorCode::kIo, "cannot bring the folder '{}' to stable storage: {}", named.string(),
         errno_text(errno));
  }
}

void rename_durably(const fs::path& from, const fs::path& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) {
    fail(ErrorCode::kIo, "cannot rename '{}' to '{}': {}", from.string(), to.string(),
         errno_text(errno));
  }
  sync_folder(to.parent_path());
}

std::vector<fs::path> list_folder(const fs::path& folder) {
  std::vector<fs::path> paths;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    paths.push_back(it->path());
  }
  check(!error, ErrorCode::kIo, "cannot list '{}': {}", folder.string(), error.message());
  std::sort(paths.begin(), paths.end());
  return paths;
}

std::string read_text_file(const fs::path& path, size_t max_bytes) {
  const UniqueFd fd = open_for_reading(path);
  const size_t bytes = file_bytes(fd, path);
  check(bytes <= max_bytes, ErrorCode::kInvalidData, "'{}' has {} bytes, at most {} are expected",
        path.string(), bytes, max_bytes);
  std::string text(bytes, '\0');
  read_at(fd, path, 0, std::as_writable_bytes(std::span(text)));
  return text;
}

void write_text_file(const fs::path& path, std::string_view text) {
  const fs::path temporary = path.string() + ".tmp";
  try {
    const UniqueFd fd = open_for_writing(temporary);
    write_at(fd, temporary, 0, std::as_bytes(std::span(text)));
    sync_file(fd, temporary);
    rename_durably(temporary, path);
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
}

void update_xxh3(Xxh3Stream& hash, const UniqueFd& fd, const fs::path& path, size_t begin,
                 size_t end) {
  std::vector<std::byte> buffer(std::min(end - begin, 4 * kMiB));
  while (begin < end) {
    const std::span<std::byte> piece(buffer.data(), std::min(buffer.size(), end - begin));
    read_at(fd, path, begin, piece);
    hash.update(piece);
    begin += piece.size();
  }
}

}  // namespace orlop

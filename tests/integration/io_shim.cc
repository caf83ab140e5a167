// Preloaded into a process, it stands between the threads that swap and the kernel: pread and
// pwrite of swap files meet the faults that ORLOP_IO_SHIM names, all others pass.
//   short     every transfer moves part of its bytes, by turns 1, half, all but one, all
//   eintr     three calls out of four are interrupted
//   eio:N     from the N-th transfer on, N counted from 0, the drive is broken
//   enospc:N  from the N-th write on, it is full
#include <dlfcn.h>
#include <sys/types.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

#include "orlop/export.h"

namespace {

using Read = ssize_t (*)(int, void*, size_t, off_t);
using Write = ssize_t (*)(int, const void*, size_t, off_t);

template <typename Call>
Call next(const char* name) {
  return reinterpret_cast<Call>(::dlsym(RTLD_NEXT, name));
}

bool is_swap_file(int fd) {
  std::array<char, 4096> target{};
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  const ssize_t length = ::readlink(link.c_str(), target.data(), target.size());
  return length > 0 &&
         std::string_view(target.data(), static_cast<size_t>(length)).ends_with(".swap");
}

struct Plan {
  std::string kind;
  long from = 0;
};

const Plan& plan() {
  static const Plan made = [] {
    const char* text = std::getenv("ORLOP_IO_SHIM");
    const std::string given = text == nullptr ? "" : text;
    const size_t colon = given.find(':');
    if (colon == std::string::npos) return Plan{given, 0};
    return Plan{given.substr(0, colon), std::stol(given.substr(colon + 1))};
  }();
  return made;
}

// Bytes to move of `count`, or -1 with errno.
ssize_t admit(int fd, size_t count, bool writes) {
  static std::atomic<long> transfers{0};
  const auto all = static_cast<ssize_t>(count);
  const std::string& kind = plan().kind;
  if (kind.empty() || !is_swap_file(fd) || (kind == "enospc" && !writes)) return all;
  const long turn = transfers++;
  if (kind == "short") {
    const std::array<ssize_t, 4> parts = {1, (all + 1) / 2, all - 1, all};
    const ssize_t part = parts[static_cast<size_t>(turn) % parts.size()];
    return part > 0 ? part : all;
  }
  if (kind == "eintr") {
    if (turn % 4 == 3) return all;
    errno = EINTR;
    return -1;
  }
  if (turn < plan().from) return all;
  errno = kind == "eio" ? EIO : ENOSPC;
  return -1;
}

}  // namespace

// Both names of each call: which one a program uses depends on how it was compiled.
extern "C" {

ORLOP_EXPORT ssize_t pread(int fd, void* data, size_t count, off_t offset) {
  static const auto call = next<Read>("pread");
  const ssize_t admitted = admit(fd, count, false);
  return admitted < 0 ? -1 : call(fd, data, static_cast<size_t>(admitted), offset);
}

ORLOP_EXPORT ssize_t pread64(int fd, void* data, size_t count, off_t offset) {
  return pread(fd, data, count, offset);
}

ORLOP_EXPORT ssize_t pwrite(int fd, const void* data, size_t count, off_t offset) {
  static const auto call = next<Write>("pwrite");
  const ssize_t admitted = admit(fd, count, true);
  return admitted < 0 ? -1 : call(fd, data, static_cast<size_t>(admitted), offset);
}

ORLOP_EXPORT ssize_t pwrite64(int fd, const void* data, size_t count, off_t offset) {
  return pwrite(fd, data, count, offset);
}
}

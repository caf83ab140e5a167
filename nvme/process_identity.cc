#include "nvme/process_identity.h"

#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <fstream>
#include <iterator>
#include <sstream>

#include <fmt/format.h>

namespace orlop::nvme {
namespace {

// The fields of /proc/PID/stat from the third on; the name in field 2 may hold spaces and brackets.
std::istringstream status_fields(int64_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string text((std::istreambuf_iterator<char>(file)), {});
  const size_t name_end = text.rfind(')');
  return std::istringstream(name_end == std::string::npos ? "" : text.substr(name_end + 1));
}

// Field 22. 0 when unreadable.
uint64_t start_ticks(int64_t pid) {
  std::istringstream fields = status_fields(pid);
  std::string skipped;
  for (int field = 3; field < 22; ++field) fields >> skipped;
  uint64_t ticks = 0;
  fields >> ticks;
  return ticks;
}

}  // namespace

ProcessIdentity this_process() {
  ProcessIdentity self;
  self.pid = ::getpid();
  self.start_ticks = start_ticks(self.pid);
  struct stat space {};
  if (::stat("/proc/self/ns/pid", &space) == 0) self.pid_namespace = space.st_ino;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> self.boot_id;
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  self.host = host.data();
  return self;
}

Liveness liveness(const ProcessIdentity& process) {
  const ProcessIdentity self = this_process();
  if (process.host == self.host && process.boot_id != self.boot_id) return Liveness::kDead;
  if (process.boot_id != self.boot_id || process.pid_namespace != self.pid_namespace) {
    return Liveness::kUnknown;
  }
  if (::kill(static_cast<pid_t>(process.pid), 0) != 0 && errno == ESRCH) return Liveness::kDead;
  const uint64_t started = start_ticks(process.pid);
  if (started != 0 && started != process.start_ticks) return Liveness::kDead;
  return Liveness::kAlive;
}

bool is_ending(const ProcessIdentity& process) {
  constexpr uint64_t kExiting = 0x4;  // PF_EXITING of the kernel
  if (liveness(process) != Liveness::kAlive) return false;
  std::istringstream fields = status_fields(process.pid);
  std::string state, skipped;
  fields >> state;
  for (int field = 4; field < 9; ++field) fields >> skipped;
  uint64_t flags = 0;
  fields >> flags;
  return state == "Z" || state == "X" || (flags & kExiting) != 0;
}

}  // namespace orlop::nvme

#include "nvme/drive_report.h"

#include <fcntl.h>
#include <linux/nvme_ioctl.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <set>

#include "base/check.h"
#include "base/unique_fd.h"
#include "nvme/direct_io.h"
#include "nvme/io_backend.h"

namespace orlop {
namespace nvme {
namespace {

// An unnamed file where the file system has such; otherwise a named one that is unlinked at once.
UniqueFd open_scratch(const std::string& directory) {
  UniqueFd fd(::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  if (fd || (errno != EOPNOTSUPP && errno != EISDIR)) return fd;
  std::string name = directory + "/orlop-probe-XXXXXX";
  fd.reset(::mkostemp(name.data(), O_CLOEXEC));
  if (fd) ::unlink(name.c_str());
  return fd;
}

// The whole drive's name for a file system on a partition of it.
std::string device_of(dev_t number) {
  std::error_code error;
  const auto path = std::filesystem::canonical(
      fmt::format("/sys/dev/block/{}:{}", ::major(number), ::minor(number)), error);
  if (error) return "";
  const bool partition = std::filesystem::exists(path / "partition", error);
  return (partition ? path.parent_path() : path).filename().string();
}

// "Percentage used" of the health log (NVMe base specification, log page 2, byte 5).
std::optional<int> percent_worn(const std::string& device) {
  if (!device.starts_with("nvme")) return std::nullopt;
  const UniqueFd fd(::open(("/dev/" + device).c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) return std::nullopt;
  constexpr uint8_t kGetLogPage = 2;
  constexpr uint32_t kHealthLog = 2;
  constexpr uint32_t kAllNamespaces = 0xffffffff;
  alignas(8) std::array<uint8_t, 512> log{};
  nvme_admin_cmd command{};
  command.opcode = kGetLogPage;
  command.nsid = kAllNamespaces;
  command.addr = reinterpret_cast<uintptr_t>(log.data());
  command.data_len = log.size();
  command.cdw10 = kHealthLog | static_cast<uint32_t>(log.size() / 4 - 1) << 16;
  if (::ioctl(fd.get(), NVME_IOCTL_ADMIN_CMD, &command) != 0) return std::nullopt;
  return log[5];
}

}  // namespace

uint64_t free_disk_bytes(std::span<const std::string> directories) {
  std::set<dev_t> seen;
  uint64_t free = 0;
  for (const std::string& directory : directories) {
    std::filesystem::path path = absolute_path(directory);
    struct stat info {};
    while (::stat(path.c_str(), &info) != 0 && path.has_relative_path()) path = path.parent_path();
    struct statvfs space {};
    check(::stat(path.c_str(), &info) == 0 && ::statvfs(path.c_str(), &space) == 0,
          ErrorCode::kUsage, "cannot look at {}: {}", path.string(), errno_text(errno));
    if (seen.insert(info.st_dev).second) {
      free += static_cast<uint64_t>(space.f_bavail) * space.f_frsize;
    }
  }
  return free;
}

}  // namespace nvme

DriveReport report_drive(const std::string& directory) {
  DriveReport report;
  report.directory = nvme::absolute_path(directory);
  const UniqueFd fd = nvme::open_scratch(report.directory);
  check(static_cast<bool>(fd), ErrorCode::kUsage, "cannot create a file in {}: {}",
        report.directory, errno_text(errno));
  struct statvfs space {};
  struct stat file {};
  check(::fstatvfs(fd.get(), &space) == 0 && ::fstat(fd.get(), &file) == 0, ErrorCode::kUsage,
        "cannot look at {}: {}", report.directory, errno_text(errno));
  report.file_system = nvme::file_system_name(fd.get());
  report.free_bytes = static_cast<uint64_t>(space.f_bavail) * space.f_frsize;
  report.total_bytes = static_cast<uint64_t>(space.f_blocks) * space.f_frsize;
  const nvme::DirectIo io = nvme::enable_direct_io(fd.get());
  report.direct = io.direct;
  report.why_not_direct = io.why_not;
  report.device = nvme::device_of(file.st_dev);
  report.percent_worn = nvme::percent_worn(report.device);
  return report;
}

IoReport report_io() {
  IoReport report;
  const nvme::BackendChoice choice = nvme::make_io_backend(nvme::IoEngine::kAuto, 1);
  report.engine = choice.backend->name();
  report.reason = choice.reason;
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    report.memlock_bytes = limit.rlim_cur;
  }
  return report;
}

}  // namespace orlop

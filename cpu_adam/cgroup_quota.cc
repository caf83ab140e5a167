#include <charconv>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string_view>

#include "cpu_adam/cpu_features.h"

namespace orlop {
namespace {

// Where a hierarchy is mounted (proc(5), mountinfo) and which part of it is visible there.
struct CgroupMount {
  std::string type;     // "cgroup" (v1) or "cgroup2"
  std::string visible;  // path within the hierarchy that the mount point shows
  std::string mount_point;
  std::string options;  // names the controllers of a v1 hierarchy
};

bool has_item(const std::string& list, std::string_view item) {
  std::istringstream items(list);
  for (std::string one; std::getline(items, one, ',');) {
    if (one == item) return true;
  }
  return false;
}

std::vector<CgroupMount> cgroup_mounts(const std::string& root) {
  std::vector<CgroupMount> mounts;
  std::ifstream file(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    std::istringstream fields(line);
    std::string id, parent, device, skipped, source;
    CgroupMount mount;
    fields >> id >> parent >> device >> mount.visible >> mount.mount_point;
    while (fields >> skipped && skipped != "-") {
    }
    fields >> mount.type >> source >> mount.options;
    if (mount.type == "cgroup2" || (mount.type == "cgroup" && has_item(mount.options, "cpu"))) {
      mounts.push_back(std::move(mount));
    }
  }
  return mounts;
}

// This process' path in the hierarchy of `type`, empty when it is in none.
std::string cgroup_path(const std::string& root, const std::string& type) {
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {  // id:controllers:path
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool v2 = line.substr(0, first) == "0" && controllers.empty();
    if (type == "cgroup2" ? v2 : has_item(controllers, "cpu")) return line.substr(second + 1);
  }
  return "";
}

std::optional<double> ratio(const std::string& quota, const std::string& period) {
  const auto number = [](const std::string& text) {
    double value = 0;
    std::from_chars(text.data(), text.data() + text.size(), value);
    return value;
  };
  // v2 writes "max" and v1 -1 for no quota.
  if (number(quota) <= 0 || number(period) <= 0) return std::nullopt;
  return number(quota) / number(period);
}

std::optional<double> quota_of(const std::filesystem::path& folder, const std::string& type) {
  std::string quota, period;
  if (type == "cgroup2") {
    std::ifstream(folder / "cpu.max") >> quota >> period;
  } else {
    std::ifstream(folder / "cpu.cfs_quota_us") >> quota;
    std::ifstream(folder / "cpu.cfs_period_us") >> period;
  }
  return ratio(quota, period);
}

// `path` as seen below the mount point. A process in a namespace may get a path that the mount does
// not show; its own group is then what the mount point shows.
std::filesystem::path below_mount(const std::string& path, const std::string& visible) {
  const std::filesystem::path relative = std::filesystem::path(path).lexically_relative(visible);
  if (relative.empty() || *relative.begin() == "..") return {};
  return relative == "." ? std::filesystem::path() : relative;
}

}  // namespace

std::optional<double> cgroup_cpu_quota(const std::string& root) {
  std::optional<double> smallest;
  for (const CgroupMount& mount : cgroup_mounts(root)) {
    const std::string path = cgroup_path(root, mount.type);
    if (path.empty()) continue;
    const std::filesystem::path top = root + mount.mount_point;
    std::filesystem::path below = below_mount(path, mount.visible);
    while (true) {  // a quota binds everything below it
      const std::optional<double> quota = quota_of(top / below, mount.type);
      if (quota && (!smallest || *quota < *smallest)) smallest = quota;
      if (below.empty()) break;
      below = below.parent_path();
    }
  }
  return smallest;
}

}  // namespace orlop

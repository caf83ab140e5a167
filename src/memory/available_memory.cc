#include "memory/available_memory.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <fstream>
#include <optional>
#include <string>
#include <string_view>

namespace orlop {
namespace {

namespace fs = std::filesystem;

std::optional<size_t> parse_number(std::string_view text) {
  size_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end == text.data()) return std::nullopt;  // "max" is no limit
  return value;
}

std::optional<size_t> read_number(const fs::path& file) {
  std::ifstream in(file);
  std::string word;
  if (!(in >> word)) return std::nullopt;
  return parse_number(word);
}

// The number after `key` in a file of "key number" lines.
std::optional<size_t> read_keyed_number(const fs::path& file, std::string_view key) {
  std::ifstream in(file);
  std::string word;
  std::string value;
  while (in >> word >> value) {
    if (word == key) return parse_number(value);
    in.ignore(1 << 12, '\n');
  }
  return std::nullopt;
}

struct CgroupFiles {
  const char* limit;
  const char* usage;
  const char* cache_key;  // page cache that can be dropped, in memory.stat
};
constexpr CgroupFiles kVersion2{"memory.max", "memory.current", "inactive_file"};
constexpr CgroupFiles kVersion1{"memory.limit_in_bytes", "memory.usage_in_bytes",
                                "total_inactive_file"};

// Room in the group at `root`/`path` and in every group above it.
size_t room_in_groups(const fs::path& root, fs::path path, const CgroupFiles& files) {
  size_t room = SIZE_MAX;
  path = path.relative_path();
  while (true) {
    const fs::path group = root / path;
    const auto limit = read_number(group / files.limit);
    const auto usage = read_number(group / files.usage);
    if (limit && usage) {
      const size_t cache = read_keyed_number(group / "memory.stat", files.cache_key).value_or(0);
      const size_t held = *usage - std::min(*usage, cache);
      room = std::min(room, *limit - std::min(*limit, held));
    }
    if (path.empty()) return room;
    path = path.parent_path();
  }
}

}  // namespace

size_t available_host_bytes(const fs::path& proc, const fs::path& cgroup) {
  size_t available = SIZE_MAX;
  if (const auto kib = read_keyed_number(proc / "meminfo", "MemAvailable:")) {
    available = *kib * 1024;
  }
  // Lines "id:controllers:path"; version 2 has id 0 and no controllers.
  std::ifstream groups(proc / "self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const fs::path path = line.substr(second + 1);
    if (controllers == ",,") {
      available = std::min(available, room_in_groups(cgroup, path, kVersion2));
      available = std::min(available, room_in_groups(cgroup / "unified", path, kVersion2));
    } else if (controllers.find(",memory,") != std::string::npos) {
      available = std::min(available, room_in_groups(cgroup / "memory", path, kVersion1));
    }
  }
  return available;
}

size_t available_host_bytes() { return available_host_bytes("/proc", "/sys/fs/cgroup"); }

}  // namespace orlop

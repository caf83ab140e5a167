#pragma once

#include <cstddef>
#include <filesystem>

namespace orlop {

// Bytes of host memory that this process can still take before the kernel would have to kill
// something: the smallest of MemAvailable and, for every memory cgroup (v1 or v2) that holds the
// process, its limit less what it uses, counting reclaimable page cache as free. SIZE_MAX where
// nothing can be read.
size_t available_host_bytes();

// The same from a given view of the system: `proc` holds meminfo and self/cgroup, `cgroup` is where
// the control groups are mounted.
size_t available_host_bytes(const std::filesystem::path& proc, const std::filesystem::path& cgroup);

}  // namespace orlop

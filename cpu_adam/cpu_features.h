#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "orlop/cpu_adam.h"  // default_threads

namespace orlop {

enum class Isa : uint8_t { kScalar, kAvx2, kAvx512 };
const char* isa_name(Isa isa);
// The widest set that this processor has and ORLOP_MAX_ISA (scalar, avx2, avx512) allows. Read on
// each call so that tests can change the variable. Throws Error(kUsage) for any other value.
Isa active_isa();

// Cores this process may use: physical cores (hyper-threads counted once) inside its affinity mask,
// capped by the cgroup's CPU quota. Never below 1.
int usable_cores();

// One line for logs and `orlop doctor`: "avx512 (avx2, avx512f, avx512_bf16), 16 cores, 1 NUMA
// node".
std::string cpu_summary();

// The parts of usable_cores.

// Cores that have at least one of the logical CPUs `allowed`. `synthetic` is an hwloc description
// such as "core:8 pu:2"; empty means this machine.
int physical_cores(const std::vector<int>& allowed, const std::string& synthetic = "");

// Logical CPUs that this thread may run on.
std::vector<int> allowed_cpus();

// Those of part `index` when the cores that `allowed` touches are cut into `parts` runs of equal
// length (those left over stay idle), in an order in which neighbours share a memory. Empty when
// there are fewer cores than parts.
std::vector<int> part_of_cpus(const std::vector<int>& allowed, int index, int parts,
                              const std::string& synthetic = "");

// CPUs that the cgroups of this process (v2, v1 or both, all levels that it can see) allow on
// average; the smallest if several do; none without a quota. Files are read below `root`, "" for
// this machine.
std::optional<double> cgroup_cpu_quota(const std::string& root = "");

}  // namespace orlop

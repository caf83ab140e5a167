#pragma once

#include <string>

namespace orlop {

// Cores this process may use: physical cores (hyper-threads counted once) inside its affinity mask,
// capped by the cgroup's CPU quota. Never below 1.
int usable_cores();

// Threads for host work: OMP_NUM_THREADS when it is set, else usable_cores(). A value of 1 on a machine
// with more cores is used only when it was asked for.
int default_threads();

// One line for logs and `orlop doctor`: "avx512 (avx2, avx512f, avx512_bf16), 16 cores, 1 NUMA node".
std::string cpu_summary();

}  // namespace orlop

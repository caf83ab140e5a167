#pragma once

#include <string>

namespace orlop {

// Bytes per second that each of `ranks` devices of this machine receives in an all_gather of all:
// GPUs 0 to ranks - 1 over NCCL, or, with device "host", threads in host memory.
double measure_collectives(const std::string& device, int ranks);

}  // namespace orlop

#pragma once

#include <cstddef>
#include <vector>

#include "zero/placement_plan.h"

namespace orlop {

// Bytes [begin, end) of an arena.
struct ArenaRange {
  size_t begin = 0;
  size_t end = 0;
};

// What of the host arena the device's queues copy, or wait for words of: all but the planes that
// only the host's update reads and writes, 10 of 14 bytes of a parameter in bf16, and the slots
// that drives fill. Whole pages, sorted and apart.
std::vector<ArenaRange> pinned_ranges(const PlanInput& input, const PlannedStep& planned);

// Their sum; none where the device is the host itself.
size_t pinned_bytes(const PlanInput& input, const PlannedStep& planned);

}  // namespace orlop

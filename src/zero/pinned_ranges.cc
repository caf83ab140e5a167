#include "zero/pinned_ranges.h"

#include <algorithm>

#include "base/bytes.h"

namespace orlop {
namespace {

constexpr size_t kPageBytes = 4096;

// From the start of a buffer.
size_t copied_bytes(const PlanInput& input, const PlacementPlan& placement,
                    const PlanBuffer& buffer) {
  if (buffer.kind == BufferKind::kSwapSlot) return 0;
  if (buffer.kind != BufferKind::kState) return buffer.bytes;
  const bool has_copy =
      placement.params[static_cast<size_t>(buffer.param)].optimizer == Tier::kHost;
  return has_copy ? input.shard_param_bytes(buffer.param) : 0;
}

void add_ranges(const PlanInput& input, const PlacementPlan& placement, const StepPlan& plan,
                std::vector<ArenaRange>& ranges) {
  for (const PlanBuffer& buffer : plan.buffers) {
    if (buffer.tier != Tier::kHost) continue;
    const size_t bytes = copied_bytes(input, placement, buffer);
    if (bytes == 0) continue;
    ranges.push_back(
        {buffer.offset / kPageBytes * kPageBytes, align_up(buffer.offset + bytes, kPageBytes)});
  }
}

}  // namespace

std::vector<ArenaRange> pinned_ranges(const PlanInput& input, const PlannedStep& planned) {
  std::vector<ArenaRange> ranges;
  for (const StepPlan* plan : {&planned.train, &planned.eval}) {
    add_ranges(input, planned.placement, *plan, ranges);
  }
  std::sort(ranges.begin(), ranges.end(),
            [](const ArenaRange& a, const ArenaRange& b) { return a.begin < b.begin; });
  std::vector<ArenaRange> apart;
  for (const ArenaRange& range : ranges) {
    if (!apart.empty() && range.begin <= apart.back().end) {
      apart.back().end = std::max(apart.back().end, range.end);
    } else {
      apart.push_back(range);
    }
  }
  return apart;
}

size_t pinned_bytes(const PlanInput& input, const PlannedStep& planned) {
  if (input.device_is_host) return 0;
  size_t sum = 0;
  for (const ArenaRange& range : pinned_ranges(input, planned)) {
    sum += range.end - range.begin;
  }
  return sum;
}

}  // namespace orlop

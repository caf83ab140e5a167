// What of host memory is pinned: all that a device's queues touch, and none of the planes that only
// the host's update does.
#include "zero/pinned_ranges.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "tests/zero/plan_input.h"

namespace orlop {
namespace {

constexpr size_t kPage = 4096;

bool is_of_device(PlanLaneKind lane) {
  return lane == PlanLaneKind::kCompute || lane == PlanLaneKind::kUpload ||
         lane == PlanLaneKind::kOffload || lane == PlanLaneKind::kComm;
}

// Bytes from the start of a buffer in host memory that an operation of a device's queue touches.
size_t touched_bytes(const PlanInput& input, const PlanOp& op, const PlanBuffer& buffer) {
  if (buffer.kind != BufferKind::kState) return buffer.bytes;
  EXPECT_EQ(op.kind, OpKind::kUploadParam) << "nothing but weights leaves the states";
  return input.shard_param_bytes(buffer.param);
}

void expect_pinned(const PlanInput& input, const PlannedStep& planned, const std::string& what) {
  const std::vector<ArenaRange> ranges = pinned_ranges(input, planned);
  const auto is_pinned = [&](size_t begin, size_t end) {
    return std::any_of(ranges.begin(), ranges.end(), [&](const ArenaRange& range) {
      return range.begin <= begin && end <= range.end;
    });
  };
  for (size_t i = 0; i < ranges.size(); ++i) {
    EXPECT_EQ(ranges[i].begin % kPage, 0u);
    EXPECT_EQ(ranges[i].end % kPage, 0u);
    EXPECT_LT(ranges[i].begin, ranges[i].end);
    if (i > 0) {
      EXPECT_LT(ranges[i - 1].end, ranges[i].begin) << "apart";
    }
  }
  for (const StepPlan* plan : {&planned.train, &planned.eval}) {
    const PlanBuffer& gates = plan->buffers[static_cast<size_t>(plan->host_scalars)];
    EXPECT_TRUE(is_pinned(gates.offset, gates.offset + gates.bytes)) << what << ": the gates";
    for (const PlanOp& op : plan->ops) {
      if (!is_of_device(op.lane)) continue;
      for (const BufferUse& use : op.uses) {
        const PlanBuffer& buffer = plan->buffer(use);
        if (buffer.tier != Tier::kHost) continue;
        EXPECT_NE(buffer.kind, BufferKind::kSwapSlot) << what;
        EXPECT_TRUE(is_pinned(buffer.offset, buffer.offset + touched_bytes(input, op, buffer)))
            << what << ": " << op_name(op.kind) << " of " << op.param;
      }
    }
  }
}

size_t sum_of(const PlanInput& input, const PlannedStep& planned) {
  size_t sum = 0;
  for (const ArenaRange& range : pinned_ranges(input, planned)) sum += range.end - range.begin;
  return sum;
}

PlannedStep planned_step(const PlanInput& input, const PlacementPlan& placement) {
  return {placement, make_train_plan(input, placement), make_eval_plan(input, placement)};
}

TEST(PinnedRanges, CoverWhatCrossesTheLinkForEveryPlacement) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const int wave : {1, 2}) {
      const PlanInput input = test::small_input(3, 2, dtype);
      PlacementPlan home = test::placement(input, 2, wave);
      expect_pinned(input, planned_step(input, home), "all in host memory");
      home.activations = Tier::kDevice;
      home.params[1].resident = true;
      home.params[2].resident = true;
      home.params[2].optimizer = Tier::kDevice;
      expect_pinned(input, planned_step(input, home), "some on the device");
      home.params[0].optimizer = Tier::kNvme;
      home.params[1].optimizer = home.params[1].copy = Tier::kNvme;
      home.params[1].resident = false;
      expect_pinned(input, planned_step(input, home), "some on drives");
      home.params[0].host_chunks = 1;
      home.params[0].host_copies = 1;
      expect_pinned(input, planned_step(input, home), "and their first chunks in host memory");
    }
  }
}

// Of 14 bytes per parameter in bf16 four cross: weights up, gradients down.
TEST(PinnedRanges, LeaveMastersAndMomentsOut) {
  const PlanInput input = test::small_input(8, 1);
  PlacementPlan home = test::placement(input, 1, 1);
  home.activations = Tier::kDevice;
  const PlannedStep planned = planned_step(input, home);
  size_t rest = 0;
  for (size_t param = 0; param < input.layout.flat_params.size(); ++param) {
    const int index = static_cast<int>(param);
    rest += input.state_bytes(index) - input.shard_param_bytes(index);
  }
  const size_t pages = 2 * kPage * (input.layout.flat_params.size() + 1);
  EXPECT_LE(sum_of(input, planned), planned.train.host_bytes - rest + pages);
  EXPECT_EQ(pinned_bytes(input, planned), sum_of(input, planned));
}

// With states on drives the slots through which they pass are the drives' alone.
TEST(PinnedRanges, LeaveSlotsOfDrivesOut) {
  const PlanInput input = test::small_input(4, 1);
  PlacementPlan home = test::placement(input, 1, 1);
  for (ParamPlacement& param : home.params) param.optimizer = param.copy = Tier::kNvme;
  const PlannedStep planned = planned_step(input, home);
  expect_pinned(input, planned, "all on drives");
  size_t slots = 0;
  for (const int slot : planned.train.swap_slots)
    slots += planned.train.buffers[static_cast<size_t>(slot)].bytes;
  EXPECT_GT(slots, 0u);
  EXPECT_LE(sum_of(input, planned), planned.train.host_bytes - slots + 4 * kPage);
}

TEST(PinnedRanges, AreNoneWhereTheDeviceIsTheHost) {
  PlanInput input = test::small_input(2, 1);
  input.device_is_host = true;
  EXPECT_EQ(pinned_bytes(input, planned_step(input, test::placement(input, 1, 1))), 0u);
}

}  // namespace
}  // namespace orlop

// The step of one of several ranks.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <utility>
#include <vector>

#include "orlop/error.h"
#include "tests/zero/plan_input.h"
#include "zero/hardware_profile.h"
#include "zero/plan_check.h"
#include "zero/simulate.h"
#include "zero/step_plan.h"

namespace orlop {
namespace {

PlanInput rank_input(int world_size) {
  PlanInput input = test::small_input(4, 3);
  input.world_size = world_size;
  return input;
}

// `resident` of the last FlatParams stay on the device, whole; the first `on_device` have their
// part of the states there.
PlacementPlan placement(const PlanInput& input, int resident, int on_device, int wave) {
  PlacementPlan plan;
  const size_t params = input.layout.flat_params.size();
  plan.params.resize(params);
  plan.wave = wave;
  plan.prefetch_depth = wave;
  for (int i = 0; i < resident; ++i)
    plan.params[params - 1 - static_cast<size_t>(i)].resident = true;
  for (int i = 0; i < on_device; ++i) {
    plan.params[static_cast<size_t>(i)].optimizer = Tier::kDevice;
  }
  return plan;
}

using Sums = std::vector<std::pair<int, int64_t>>;  // FlatParam and count, in order

Sums sums_over_ranks(const PlanInput& input, const StepPlan& plan) {
  Sums sums;
  for (const PlanOp& op : plan.ops) {
    if (op.kind == OpKind::kReduceScatter || op.kind == OpKind::kSumGrad)
      sums.push_back({op.param, input.shard_numel(op.param)});
  }
  return sums;
}

int count(const StepPlan& plan, OpKind kind) {
  return static_cast<int>(std::count_if(plan.ops.begin(), plan.ops.end(),
                                        [&](const PlanOp& op) { return op.kind == kind; }));
}

TEST(RankPlan, EveryStageProvesItselfAndSumsAlike) {
  for (const int world_size : {2, 3, 4, 7}) {
    const PlanInput input = rank_input(world_size);
    const int params = static_cast<int>(input.layout.flat_params.size());
    const Sums expected =
        sums_over_ranks(input, make_train_plan(input, placement(input, params, 0, 3)));
    ASSERT_EQ(expected.size(), static_cast<size_t>(params));
    for (int resident = 0; resident <= params; ++resident) {
      for (int on_device = 0; on_device <= params; on_device += 2) {
        for (int wave = 1; wave <= 3; ++wave) {
          const PlacementPlan plan = placement(input, resident, on_device, wave);
          const StepPlan train = make_train_plan(input, plan);
          ASSERT_NO_THROW(plan_check(input, plan, train, true))
              << world_size << " ranks, resident " << resident << ", shards " << on_device;
          ASSERT_NO_THROW(plan_check(input, plan, make_eval_plan(input, plan), false));
          EXPECT_EQ(sums_over_ranks(input, train), expected) << "the order of sums is their bits";
          EXPECT_EQ(count(train, OpKind::kGatherNorms), 1);
        }
      }
    }
  }
}

TEST(RankPlan, GradientsInSixteenBitsProveThemselves) {
  for (const DType compute : {DType::kBF16, DType::kF32}) {
    for (const int world_size : {2, 3, 8}) {
      PlanInput input = rank_input(world_size);
      input.compute_dtype = compute;
      const int params = static_cast<int>(input.layout.flat_params.size());
      const Sums expected =
          sums_over_ranks(input, make_train_plan(input, placement(input, params, 0, 3)));
      const PlanInput wide = input;
      input.gradient_wire = DType::kBF16;
      for (const int on_device : {0, 2, params}) {
        for (int wave = 1; wave <= 3; ++wave) {
          const PlacementPlan plan = placement(input, params - on_device, on_device, wave);
          const StepPlan train = make_train_plan(input, plan);
          ASSERT_NO_THROW(plan_check(input, plan, train, true))
              << world_size << " ranks, shards " << on_device << ", wave " << wave;
          EXPECT_EQ(sums_over_ranks(input, train), expected);
          EXPECT_EQ(count(train, OpKind::kReduceScatter), 0);
          EXPECT_GE(train.device_bytes, make_train_plan(wide, plan).device_bytes);
        }
      }
    }
  }
}

// In the plan, and in its time: what gradients take on the wire is half.
TEST(RankPlan, GradientsInSixteenBitsAreHalfTheBytes) {
  PlanInput input = rank_input(4);
  const PlacementPlan where = placement(input, 0, 0, 3);
  HardwareProfile profile = default_profile({.name = "host", .is_host = true}, 2);
  profile.launch_seconds = 0;
  profile.device_bytes_per_s = 1e30;
  const auto bytes_and_seconds = [&](OpKind kind) {
    const StepPlan plan = make_train_plan(input, where);
    std::pair<size_t, double> sum{};
    for (const PlanOp& op : plan.ops) {
      if (op.kind != kind) continue;
      sum.first += received_bytes(input, op);
      sum.second += op_seconds(input, plan, op, profile);
    }
    return sum;
  };
  const auto wide = bytes_and_seconds(OpKind::kReduceScatter);
  const auto weights = bytes_and_seconds(OpKind::kAllGather);
  input.gradient_wire = DType::kBF16;
  const auto narrow = bytes_and_seconds(OpKind::kExchangeGrad);
  EXPECT_GT(narrow.first, 0u);
  EXPECT_EQ(wide.first, 2 * narrow.first);
  EXPECT_DOUBLE_EQ(wide.second, 2 * narrow.second);
  EXPECT_EQ(weights, bytes_and_seconds(OpKind::kAllGather));
}

// Whole copies are gathered once per step; parts are gathered for every stay on the device.
TEST(RankPlan, StagesDifferInHowOftenTheyGather) {
  const PlanInput input = rank_input(2);
  const int params = static_cast<int>(input.layout.flat_params.size());
  const StepPlan whole = make_train_plan(input, placement(input, params, 0, 3));
  const StepPlan parts = make_train_plan(input, placement(input, 0, 0, 3));
  EXPECT_EQ(count(whole, OpKind::kAllGather), params);
  EXPECT_GT(count(parts, OpKind::kAllGather), params);
  EXPECT_LT(parts.device_bytes, whole.device_bytes);
  EXPECT_EQ(parts.host_bytes, whole.host_bytes);
}

TEST(RankPlan, OneRankHasNoCollectives) {
  const PlanInput input = rank_input(1);
  const StepPlan plan = make_train_plan(input, placement(input, 2, 2, 1));
  for (const PlanOp& op : plan.ops) EXPECT_NE(op.lane, PlanLaneKind::kComm) << op_name(op.kind);
}

TEST(RankPlan, RanksShareStatesAndLinks) {
  const PlanInput one = rank_input(1);
  const PlanInput four = rank_input(4);
  const int params = static_cast<int>(one.layout.flat_params.size());
  for (int param = 0; param < params; ++param) {
    const size_t granule_bytes = 128 * 12;
    EXPECT_GE(4 * four.state_bytes(param), one.state_bytes(param));
    EXPECT_LT(four.state_bytes(param), one.state_bytes(param) / 4 + granule_bytes);
  }
  const HardwareProfile profile = default_profile({.name = "host", .is_host = true}, 2);
  const auto upload_seconds = [&](const PlanInput& input) {
    const Simulation time =
        simulate(input, make_train_plan(input, placement(input, 0, 0, 3)), profile);
    return time.busy_seconds[static_cast<size_t>(PlanLaneKind::kUpload)];
  };
  EXPECT_LT(upload_seconds(four), upload_seconds(one));
}

// What is summed over the ranks has the whole backward pass of another block to arrive.
TEST(RankPlan, ComputeNeverWaitsForTheSumsOfTheVisitBefore) {
  const PlanInput input = rank_input(4);
  const int params = static_cast<int>(input.layout.flat_params.size());
  for (const int on_device : {0, params}) {
    for (const int wave : {1, 3}) {
      const StepPlan plan = make_train_plan(input, placement(input, 0, on_device, wave));
      int waits = 0;
      for (const PlanOp& op : plan.ops) {
        if (op.kind != OpKind::kBackward && op.kind != OpKind::kZeroGrad) continue;
        for (const int wait : op.waits) {
          const PlanOp& sum = plan.ops[static_cast<size_t>(wait)];
          if (sum.kind != OpKind::kReduceScatter && sum.kind != OpKind::kRoundGrad) continue;
          ++waits;
          const auto first = plan.ops.begin() + wait;
          EXPECT_TRUE(std::any_of(first, plan.ops.begin() + (&op - plan.ops.data()),
                                  [](const PlanOp& o) { return o.kind == OpKind::kBackward; }))
              << op_name(op.kind) << " of " << op.block << ", " << op.param << " waits for "
              << op_name(sum.kind) << " of " << sum.param;
        }
      }
      EXPECT_GT(waits, 0);  // the bytes of gradients are used again
    }
  }
}

// The stall of a step whose collectives are as fast as those of GPUs: what the last sum and the
// first weights take.
TEST(RankPlan, CollectivesHideBehindBackward) {
  PlanInput input = rank_input(4);
  const int params = static_cast<int>(input.layout.flat_params.size());
  HardwareProfile profile = default_profile({.name = "host", .is_host = true}, 2);
  profile.launch_seconds = 0;
  const StepPlan plan = make_train_plan(input, placement(input, 0, params, 3));
  double most = 0;  // seconds of one FlatParam's collectives, made half of a layer's backward pass
  double shortest = 1e30;
  for (const PlanOp& op : plan.ops) {
    const double seconds = op_seconds(input, plan, op, profile);
    if (op.lane == PlanLaneKind::kComm) most = std::max(most, seconds);
    if (op.kind == OpKind::kBackward && op.block > 0) shortest = std::min(shortest, seconds);
  }
  profile.collective_bytes_per_s *= 4 * most / shortest;
  const Simulation time = simulate(input, plan, profile);
  const size_t comm = static_cast<size_t>(PlanLaneKind::kComm);
  EXPECT_LT(time.stall_seconds[comm], 0.25 * time.busy_seconds[comm]);
}

TEST(PlanCheck, FindsWeightsThatNotAllRanksHaveBrought) {
  const PlanInput input = rank_input(2);
  const PlacementPlan where = placement(input, 0, 0, 3);
  for (const OpKind kind : {OpKind::kAllGather, OpKind::kReduceScatter}) {
    StepPlan plan = make_train_plan(input, where);
    const auto op = std::find_if(plan.ops.begin(), plan.ops.end(),
                                 [&](const PlanOp& candidate) { return candidate.kind == kind; });
    ASSERT_NE(op, plan.ops.end());
    op->kind = OpKind::kZeroGrad;  // touches the same bytes at the same place
    EXPECT_THROW(plan_check(input, where, plan, true), Error) << op_name(kind);
  }
}

TEST(PlanCheck, FindsGradientsThatMissAStationOfTheirJourney) {
  PlanInput input = rank_input(3);
  input.gradient_wire = DType::kBF16;
  const PlacementPlan where = placement(input, 0, 0, 3);
  for (const OpKind kind : {OpKind::kNarrowGrad, OpKind::kExchangeGrad, OpKind::kSumGrad}) {
    StepPlan plan = make_train_plan(input, where);
    const auto op = std::find_if(plan.ops.begin(), plan.ops.end(),
                                 [&](const PlanOp& candidate) { return candidate.kind == kind; });
    ASSERT_NE(op, plan.ops.end());
    op->kind = OpKind::kZeroGrad;
    EXPECT_THROW(plan_check(input, where, plan, true), Error) << op_name(kind);
  }
}

}  // namespace
}  // namespace orlop

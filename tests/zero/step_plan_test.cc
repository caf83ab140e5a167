#include "zero/step_plan.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "orlop/error.h"
#include "tests/zero/plan_input.h"
#include "zero/plan_check.h"
#include "zero/plan_memory.h"

namespace orlop {
namespace {

using test::expect_golden;
using test::placement;
using test::small_input;

TEST(StepPlan, EveryPlacementProvesItself) {
  PlanInput input = small_input(4, 3);
  const int params = static_cast<int>(input.layout.flat_params.size());
  int plans = 0;
  for (int prefetch = 0; prefetch <= 4; ++prefetch) {
    for (int wave = 1; wave <= 3; ++wave) {
      for (int resident = 0; resident <= params; ++resident) {
        for (int on_device = 0; on_device <= params; on_device += 2) {
          PlacementPlan plan = placement(input, prefetch, wave);
          plan.activations = (resident + wave) % 2 == 0 ? Tier::kDevice : Tier::kHost;
          plan.gradients_in_flight = 1 + (resident + prefetch) % 3;
          input.updates_wait_for_norm = (resident + on_device / 2) % 2 == 0;
          for (int i = 0; i < resident; ++i)
            plan.params[static_cast<size_t>(params - 1 - i)].resident = true;
          for (int i = 0; i < on_device; ++i) {
            plan.params[static_cast<size_t>(i)] = {.resident = true, .optimizer = Tier::kDevice};
          }
          ASSERT_NO_THROW(plan_check(input, plan, make_train_plan(input, plan), true))
              << "prefetch " << prefetch << " wave " << wave << " resident " << resident
              << " shards " << on_device;
          ASSERT_NO_THROW(plan_check(input, plan, make_eval_plan(input, plan), false));
          ++plans;
        }
      }
    }
  }
  EXPECT_EQ(plans, 5 * 3 * (params + 1) * ((params + 2) / 2));
}

// Index of the last operation of a kind, for a FlatParam if one is given.
int last_of(const StepPlan& plan, OpKind kind, int param = -1) {
  int last = -1;
  for (size_t i = 0; i < plan.ops.size(); ++i) {
    if (plan.ops[i].kind == kind && (param < 0 || plan.ops[i].param == param))
      last = static_cast<int>(i);
  }
  return last;
}

TEST(StepPlan, WithoutANormUpdatesFollowTheirGradientsInsideBackward) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    PlanInput input = small_input(6, 2, dtype);
    input.updates_wait_for_norm = false;
    PlacementPlan home = placement(input, 1, 1);
    home.params[2] = {.resident = true, .optimizer = Tier::kDevice};
    const StepPlan plan = make_train_plan(input, home);
    const int last_backward = last_of(plan, OpKind::kBackward);
    const int params = static_cast<int>(input.layout.flat_params.size());
    for (int param = 1; param < params; ++param) {  // the embedding's gradient is the last
      const bool on_device = param == 2;
      const OpKind source = on_device ? OpKind::kRoundGrad : OpKind::kOffloadGrad;
      const int update = last_of(plan, on_device ? OpKind::kDeviceAdam : OpKind::kHostAdam, param);
      EXPECT_GT(update, last_of(plan, source, param));
      EXPECT_LT(update, last_backward) << param;
    }
    for (const PlanBuffer& buffer : plan.buffers) {
      EXPECT_FALSE(buffer.persistent && buffer.kind == BufferKind::kRoundedGrad);
    }
  }
}

size_t host_grad_bytes(const PlanInput& input, int gradients_in_flight) {
  PlacementPlan home = placement(input, 1, 1);
  home.activations = Tier::kDevice;
  home.gradients_in_flight = gradients_in_flight;
  const StepPlan plan = make_train_plan(input, home);
  size_t others = 0;
  for (const PlanBuffer& buffer : plan.buffers) {
    if (buffer.tier == Tier::kHost && buffer.kind != BufferKind::kRoundedGrad)
      others += align_up(buffer.bytes, kDeviceAlignment);
  }
  return plan.host_bytes - others;
}

TEST(StepPlan, GradientsInFlightTakeTurnsInHostMemory) {
  PlanInput input = small_input(8, 1);
  input.updates_wait_for_norm = false;
  const size_t largest = input.rounded_grad_bytes(1);
  EXPECT_LE(input.rounded_grad_bytes(0), largest) << "the layers are the largest here";
  for (int in_flight = 1; in_flight <= 4; ++in_flight) {
    EXPECT_EQ(host_grad_bytes(input, in_flight), static_cast<size_t>(in_flight) * largest);
  }
  // The queue that brings a gradient waits for the update that still reads the one before it.
  PlacementPlan home = placement(input, 1, 1);
  const StepPlan plan = make_train_plan(input, home);
  const int third = last_of(plan, OpKind::kOffloadGrad, 3);
  const std::vector<int>& waits = plan.ops[static_cast<size_t>(third)].waits;
  EXPECT_NE(std::find(waits.begin(), waits.end(), last_of(plan, OpKind::kHostAdam, 4)),
            waits.end());
}

TEST(StepPlan, LinkBytesDoNotGrowWithMicroBatches) {
  const auto uploads = [](int micro_batches) {
    const PlanInput input = small_input(4, micro_batches);
    const StepPlan plan = make_train_plan(input, placement(input, 1, micro_batches));
    int count = 0;
    for (const PlanOp& op : plan.ops) count += op.kind == OpKind::kUploadParam ? 1 : 0;
    return count;
  };
  EXPECT_EQ(uploads(1), uploads(8));
}

TEST(StepPlan, PrefetchIssuesTheUploadAheadOfTheBlock) {
  const PlanInput input = small_input(4, 1);
  const StepPlan plan = make_train_plan(input, placement(input, 2, 1));
  int uploaded = 0;
  for (const PlanOp& op : plan.ops) {
    if (op.kind == OpKind::kUploadParam) ++uploaded;
    if (op.kind == OpKind::kForward && op.block == 0) {
      EXPECT_EQ(uploaded, 3) << "blocks 0, 1 and 2 are on their way before block 0 runs";
      break;
    }
  }
}

TEST(StepPlan, PersistentBuffersLieAtTheSamePlaceInEveryPlan) {
  const PlanInput four = small_input(4, 4);
  PlacementPlan plan = placement(four, 1, 2);
  plan.params[1].resident = true;
  plan.params[0] = {.resident = true, .optimizer = Tier::kDevice};
  PlanInput two = four;
  two.micro_batches = 2;
  const StepPlan a = make_train_plan(four, plan);
  const StepPlan b = make_train_plan(two, plan);
  const StepPlan c = make_eval_plan(four, plan);
  int persistent = 0;
  for (size_t i = 0; i < a.buffers.size() && a.buffers[i].persistent; ++i) {
    for (const StepPlan* other : {&b, &c}) {
      EXPECT_EQ(a.buffers[i].offset, other->buffers[i].offset);
      EXPECT_EQ(a.buffers[i].bytes, other->buffers[i].bytes);
    }
    ++persistent;
  }
  EXPECT_GT(persistent, 10);
}

TEST(StepPlan, LessPrefetchAndFewerResidentsNeedLessMemory) {
  const PlanInput input = small_input(8, 2);
  const size_t lean = make_train_plan(input, placement(input, 0, 1)).device_bytes;
  const size_t prefetching = make_train_plan(input, placement(input, 2, 1)).device_bytes;
  PlacementPlan resident = placement(input, 0, 1);
  for (ParamPlacement& param : resident.params) param.resident = true;
  EXPECT_LE(lean, prefetching);
  EXPECT_LT(prefetching, make_train_plan(input, resident).device_bytes);
}

// They take 2 bytes times hidden size, layers and tokens there, but for the few on their way.
TEST(StepPlan, BlockInputsInHostMemoryLeaveTheDevice) {
  PlanInput input = small_input(8, 6);
  input.shape = {4096, 4096};
  const size_t all = size_t{2} * 64 * 8 * 6 * 4096;
  EXPECT_EQ(8 * 6 * input.activation_bytes(), all);
  PlacementPlan plan = placement(input, 1, 6);
  plan.activations = Tier::kDevice;
  const StepPlan on_device = make_train_plan(input, plan);
  plan.activations = Tier::kHost;
  const StepPlan on_host = make_train_plan(input, plan);
  const size_t few = 5 * input.activation_bytes();
  EXPECT_LE(on_host.device_bytes, on_device.device_bytes - all + few);
  EXPECT_GE(on_host.host_bytes, on_device.host_bytes + all - few);
  EXPECT_LE(on_host.host_bytes, on_device.host_bytes + all);
}

TEST(PlanCheck, FindsAMissingWait) {
  const PlanInput input = small_input(4, 2);
  const PlacementPlan home = placement(input, 1, 2);
  const StepPlan plan = make_train_plan(input, home);
  int planted = 0;
  for (size_t i = 0; i < plan.ops.size(); ++i) {
    if (plan.ops[i].waits.empty()) continue;
    StepPlan broken = plan;
    broken.ops[i].waits.clear();
    try {
      plan_check(input, home, broken, true);
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("not ordered"), std::string::npos) << error.what();
      ++planted;
    }
  }
  // A wait may be implied by others; most are not.
  EXPECT_GT(planted, 20);
}

TEST(PlanCheck, FindsWorkThatDoesNotWaitForTheStepBefore) {
  for (const bool wait_for_norm : {true, false}) {
    PlanInput input = small_input(4, 2);
    input.updates_wait_for_norm = wait_for_norm;
    const PlacementPlan home = placement(input, 1, 2);
    const StepPlan plan = make_train_plan(input, home);
    int planted = 0;
    for (size_t i = 0; i < plan.ops.size(); ++i) {
      if (plan.ops[i].after_update < 0) continue;
      StepPlan broken = plan;
      broken.ops[i].after_update = -1;
      try {
        plan_check(input, home, broken, true);
      } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find("step before"), std::string::npos) << error.what();
        ++planted;
      }
    }
    EXPECT_GT(planted, 0);
  }
}

TEST(PlanCheck, FindsABlockThatRunsOnUpdatedWeights) {
  PlanInput input = small_input(4, 2);
  input.updates_wait_for_norm = false;
  PlacementPlan home = placement(input, 1, 2);
  for (ParamPlacement& param : home.params) param = {.resident = true, .optimizer = Tier::kDevice};
  StepPlan plan = make_train_plan(input, home);
  const auto update = static_cast<size_t>(last_of(plan, OpKind::kDeviceAdam, 3));
  const auto backward = std::find_if(plan.ops.begin(), plan.ops.end(), [](const PlanOp& op) {
    return op.kind == OpKind::kBackward && op.block == 3;
  });
  std::rotate(backward, plan.ops.begin() + static_cast<std::ptrdiff_t>(update),
              plan.ops.begin() + static_cast<std::ptrdiff_t>(update) + 1);
  EXPECT_THROW(plan_check(input, home, plan, true), Error);
}

TEST(PlanCheck, FindsSharedBytesAndMissingWork) {
  const PlanInput input = small_input(2, 1);
  const PlacementPlan home = placement(input, 1, 1);
  StepPlan shared = make_train_plan(input, home);
  for (PlanBuffer& buffer : shared.buffers) {
    if (buffer.kind == BufferKind::kGrad) buffer.offset = 0;
  }
  EXPECT_THROW(plan_check(input, home, shared, true), Error);
  StepPlan forgetful = make_train_plan(input, home);
  for (size_t i = 0; i < forgetful.ops.size(); ++i) {
    if (forgetful.ops[i].kind == OpKind::kHostAdam) {
      forgetful.ops.resize(i);
      break;
    }
  }
  EXPECT_THROW(plan_check(input, home, forgetful, true), Error);
}

TEST(StepPlan, PrintedPlanIsTheReviewedOne) {
  const PlanInput input = small_input(2, 2);
  PlacementPlan home = placement(input, 1, 1);
  home.params[1].resident = true;
  expect_golden(make_train_plan(input, home).to_text(input), "step_plan_2_layers_2_waves.txt");
}

}  // namespace
}  // namespace orlop

// Step plans in which drives take part.

#include <gtest/gtest.h>

#include <algorithm>

#include "orlop/error.h"
#include "tests/zero/plan_input.h"
#include "zero/plan_check.h"
#include "zero/step_plan.h"

namespace orlop {
namespace {

using test::expect_golden;
using test::placement;
using test::small_input;

// States of the last FlatParams on drives: optimizer states of `states`, compute copies of
// `copies`.
void swap(PlacementPlan& plan, int states, int copies, int slots, int ahead) {
  const int params = static_cast<int>(plan.params.size());
  for (int i = params - states; i < params; ++i)
    plan.params[static_cast<size_t>(i)].optimizer = Tier::kNvme;
  for (int i = params - copies; i < params; ++i)
    plan.params[static_cast<size_t>(i)].copy = Tier::kNvme;
  plan.swap_slots = slots;
  plan.swap_ahead = ahead;
}

// The first chunks of what is on drives stay in host memory: `states`, and so many more copies.
void keep(const PlanInput& input, PlacementPlan& plan, int states, int copies) {
  for (size_t i = 0; i < plan.params.size(); ++i) {
    ParamPlacement& home = plan.params[i];
    const int most = plan.chunk_count(input.shard_numel(static_cast<int>(i))) - 1;
    if (home.optimizer == Tier::kNvme) home.host_chunks = std::min(states, most);
    if (home.copy == Tier::kNvme) home.host_copies = std::min(states + copies, most);
  }
}

TEST(StepPlan, EveryPlacementWithDrivesProvesItself) {
  PlanInput input = small_input(3, 3);
  const int params = static_cast<int>(input.layout.flat_params.size());
  for (int states = 1; states <= params; ++states) {
    for (int copies = 0; copies <= states; ++copies) {
      for (int slots = 1; slots <= 4; ++slots) {
        PlacementPlan plan = placement(input, slots % 3, 1 + copies % 3);
        swap(plan, states, copies, slots, states % 3);
        plan.chunk_numel = states % 2 == 0 ? 4 * kChunkGranule : kChunkGranule;
        keep(input, plan, (slots + copies) % 3, slots / 2);
        plan.params[static_cast<size_t>(states - 1)].resident = true;
        input.updates_wait_for_norm = (states + copies) % 2 == 0;
        ASSERT_NO_THROW(plan_check(input, plan, make_train_plan(input, plan), true))
            << states << " states, " << copies << " copies on drives, " << slots << " slots";
        ASSERT_NO_THROW(plan_check(input, plan, make_eval_plan(input, plan), false));
      }
    }
  }
}

TEST(StepPlan, EveryPlacementWithBlockInputsOnDrivesProvesItself) {
  PlanInput input = small_input(4, 5);
  const int params = static_cast<int>(input.layout.flat_params.size());
  for (int prefetch = 0; prefetch <= 2; ++prefetch) {
    for (int wave = 1; wave <= 5; ++wave) {
      for (int kept = 0; kept < 4 * wave; kept += 1 + kept / 2) {
        PlacementPlan plan = placement(input, prefetch, wave);
        plan.activations = Tier::kNvme;
        plan.host_inputs = kept;
        const int states = (prefetch + wave + kept) % (params + 1);
        swap(plan, states, std::min(states, wave % 2), 2, kept % 3);
        input.updates_wait_for_norm = (wave + kept) % 2 == 0;
        const StepPlan step = make_train_plan(input, plan);
        ASSERT_NO_THROW(plan_check(input, plan, step, true))
            << "prefetch " << prefetch << " wave " << wave << ", kept " << kept;
        EXPECT_EQ(step.nvme_input_bytes,
                  static_cast<size_t>(4 * wave - kept) * input.drive_activation_bytes())
            << "as much as one wave has";
        int out = 0;
        int in = 0;
        for (const PlanOp& op : step.ops) {
          out += op.kind == OpKind::kSwapOutInput ? 1 : 0;
          in += op.kind == OpKind::kSwapInInput ? 1 : 0;
        }
        EXPECT_EQ(out, in);
        EXPECT_GT(out, 0);
        ASSERT_NO_THROW(plan_check(input, plan, make_eval_plan(input, plan), false));
      }
    }
  }
}

// However many there are, a few are in host memory, and each crosses the drives once each way.
TEST(StepPlan, BlockInputsOnDrivesLeaveHostMemory) {
  PlanInput input = small_input(8, 6);
  input.shape = {4096, 4096};
  PlacementPlan plan = placement(input, 1, 6);
  const size_t on_host = make_train_plan(input, plan).host_bytes;
  plan.activations = Tier::kNvme;
  const StepPlan swapped = make_train_plan(input, plan);
  const size_t all = 8 * 6 * input.drive_activation_bytes();
  EXPECT_EQ(swapped.nvme_bytes, all);
  EXPECT_LE(swapped.host_bytes, on_host - all + 5 * input.drive_activation_bytes());
  for (const OpKind kind : {OpKind::kSwapOutInput, OpKind::kSwapInInput}) {
    size_t moved = 0;
    for (const PlanOp& op : swapped.ops) moved += op.kind == kind ? op.swap_bytes : 0;
    EXPECT_EQ(moved, all);
  }
  const auto none_waits = [&](OpKind kind, PlanLaneKind lane) {
    int waits = 0;
    for (const PlanOp& op : swapped.ops) {
      if (op.kind != kind) continue;
      for (const int wait : op.waits)
        waits += swapped.ops[static_cast<size_t>(wait)].lane == lane ? 1 : 0;
    }
    return waits == 0;
  };
  EXPECT_TRUE(none_waits(OpKind::kForward, PlanLaneKind::kSwapOut))
      << "compute waits for the copy to host memory alone";
}

// Everything on drives costs host memory a few slots and what is in flight; and each step reads
// states once and compute copies twice, and writes all once.
TEST(StepPlan, StatesOnDrivesLeaveHostMemory) {
  const PlanInput input = small_input(8, 1);
  PlacementPlan plan = placement(input, 1, 1);
  const StepPlan at_home = make_train_plan(input, plan);
  swap(plan, static_cast<int>(plan.params.size()), static_cast<int>(plan.params.size()), 2, 0);
  const StepPlan swapped = make_train_plan(input, plan);
  size_t states = 0;
  size_t copies = 0;
  for (size_t param = 0; param < plan.params.size(); ++param) {
    states += input.state_bytes(static_cast<int>(param));
    copies += input.param_bytes(static_cast<int>(param));
  }
  EXPECT_GE(swapped.nvme_bytes, states);
  EXPECT_LT(swapped.nvme_bytes, states + states / 4);  // padding of these small chunks
  EXPECT_LT(swapped.host_bytes, at_home.host_bytes - states * 3 / 4);
  size_t read = 0;
  size_t written = 0;
  for (const PlanOp& op : swapped.ops) {
    (op.kind == OpKind::kSwapOutStates ? written : read) += op.swap_bytes;
  }
  EXPECT_EQ(written, swapped.nvme_bytes);
  EXPECT_GE(read, states + copies);
  EXPECT_LT(read, swapped.nvme_bytes + 3 * copies);
}

// Every chunk that stays leaves the drives, and what they move, by its own bytes.
TEST(StepPlan, ChunksThatStayInHostMemoryAreNotMoved) {
  const PlanInput input = small_input(8, 1);
  PlacementPlan plan = placement(input, 1, 1);
  const int params = static_cast<int>(plan.params.size());
  swap(plan, params, params, 2, 0);
  const auto moved = [](const StepPlan& step, OpKind kind) {
    size_t bytes = 0;
    for (const PlanOp& op : step.ops) bytes += op.kind == kind ? op.swap_bytes : 0;
    return bytes;
  };
  const StepPlan all = make_train_plan(input, plan);
  keep(input, plan, 3, 2);
  const StepPlan some = make_train_plan(input, plan);
  size_t states = 0;
  size_t copies = 0;
  for (int param = 0; param < params; ++param) {
    const ParamPlacement& home = plan.params[static_cast<size_t>(param)];
    for (const StateChunk& chunk : plan.chunks(input.shard_numel(param))) {
      if (chunk.index < home.host_chunks) states += chunk_rest_bytes(input, chunk);
      if (chunk.index < home.host_copies) copies += chunk_copy_bytes(input, chunk);
    }
  }
  EXPECT_GT(states, 0u);
  EXPECT_GT(copies, 0u);
  EXPECT_EQ(all.nvme_bytes - some.nvme_bytes, states + copies);
  EXPECT_EQ(moved(some, OpKind::kSwapOutStates), some.nvme_bytes);
  EXPECT_EQ(moved(some, OpKind::kSwapInStates), some.nvme_bytes);
  EXPECT_EQ(moved(all, OpKind::kSwapInParam) - moved(some, OpKind::kSwapInParam), 2 * copies)
      << "forward and backward";
  EXPECT_GE(some.host_bytes, all.host_bytes + states);
  EXPECT_LE(some.host_bytes, all.host_bytes + states + copies);
}

// The first chunks are on their way before the update of what is in memory begins.
TEST(StepPlan, DrivesWorkWhileHostMemoryIsUpdated) {
  const PlanInput input = small_input(4, 1);
  PlacementPlan home = placement(input, 1, 1);
  swap(home, 2, 0, 3, 0);
  const StepPlan plan = make_train_plan(input, home);
  const auto first = [&](OpKind kind) {
    return std::find_if(plan.ops.begin(), plan.ops.end(),
                        [&](const PlanOp& op) { return op.kind == kind; });
  };
  EXPECT_LT(first(OpKind::kSwapInStates), first(OpKind::kHostAdam));
}

TEST(PlanCheck, FindsChunksOutOfTurn) {
  const PlanInput input = small_input(2, 1);
  PlacementPlan home = placement(input, 1, 1);
  swap(home, 3, 2, 3, 1);
  const StepPlan plan = make_train_plan(input, home);
  int planted = 0;
  for (size_t i = 0; i < plan.ops.size(); ++i) {
    if (!is_host_update(plan.ops[i].kind) || plan.ops[i].chunk.index < 0) continue;
    StepPlan broken = plan;
    broken.ops[i].chunk.index += 1;
    EXPECT_THROW(plan_check(input, home, broken, true), Error) << "operation " << i;
    ++planted;
  }
  EXPECT_GT(planted, 20);
}

TEST(PlanCheck, FindsAShareThatIsNotWhereItIsAtHome) {
  const PlanInput input = small_input(2, 1);
  PlacementPlan home = placement(input, 1, 1);
  swap(home, 3, 2, 3, 1);
  keep(input, home, 2, 1);
  const StepPlan plan = make_train_plan(input, home);
  ASSERT_NO_THROW(plan_check(input, home, plan, true));
  for (const int difference : {-1, 1}) {
    PlacementPlan states = home;
    states.params[2].host_chunks += difference;
    EXPECT_THROW(plan_check(input, states, plan, true), Error) << difference;
    PlacementPlan copies = home;
    copies.params[2].host_copies += difference;
    EXPECT_THROW(plan_check(input, copies, plan, true), Error) << difference;
  }
  PlacementPlan none = home;
  none.params[2].host_chunks = none.params[2].host_copies = 1000;
  EXPECT_THROW(plan_check(input, none, make_train_plan(input, none), true), Error);
}

TEST(PlanCheck, FindsABlockInputThatIsReadBeforeItIsOnItsDriveOrIsAnothers) {
  const PlanInput input = small_input(4, 2);
  PlacementPlan home = placement(input, 1, 2);
  home.activations = Tier::kNvme;
  const StepPlan plan = make_train_plan(input, home);
  int unordered = 0;
  for (size_t i = 0; i < plan.ops.size(); ++i) {
    const PlanOp& op = plan.ops[i];
    if (op.kind != OpKind::kSwapInInput && op.kind != OpKind::kSwapOutInput) continue;
    StepPlan other = plan;
    other.ops[i].block = op.block == 1 ? 2 : 1;
    EXPECT_THROW(plan_check(input, home, other, true), Error) << i;
    StepPlan broken = plan;
    broken.ops[i].waits.clear();
    try {
      plan_check(input, home, broken, true);
    } catch (const Error&) {
      ++unordered;
    }
  }
  EXPECT_GE(unordered, 8) << "every one that goes out waits for its copy";
}

TEST(StepPlan, PrintedPlanWithBlockInputsOnDrivesIsTheReviewedOne) {
  const PlanInput input = small_input(2, 2);
  PlacementPlan home = placement(input, 1, 2);
  home.activations = Tier::kNvme;
  home.host_inputs = 1;
  expect_golden(make_train_plan(input, home).to_text(input), "step_plan_2_layers_inputs.txt");
}

TEST(StepPlan, PrintedPlanWithDrivesIsTheReviewedOne) {
  const PlanInput input = small_input(2, 1);
  PlacementPlan home = placement(input, 1, 1);
  home.chunk_numel = 4 * kChunkGranule;
  swap(home, 3, 2, 3, 1);
  home.params[1].host_chunks = home.params[2].host_chunks = 1;
  home.params[2].host_copies = 2;
  expect_golden(make_train_plan(input, home).to_text(input), "step_plan_2_layers_drives.txt");
}

}  // namespace
}  // namespace orlop

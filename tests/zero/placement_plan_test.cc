#include "zero/placement_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "orlop/error.h"
#include "tests/zero/plan_input.h"
#include "zero/simulate.h"

namespace orlop {
namespace {

using test::small_input;
using testing::HasSubstr;
using testing::Not;

constexpr size_t kPlenty = size_t{1} << 30;

// A machine of these tests' own.
HardwareProfile profile() {
  const TypicalRates rates{
      .matmul_flop_per_s = 5e14, .device_bytes_per_s = 2.5e12, .link_bytes_per_s = 5e10};
  return default_profile({.name = "test", .is_host = false, .typical = rates}, 4);
}

size_t device_bytes(const PlanInput& input, const PlannedStep& planned) {
  return make_report(input, planned, {kPlenty, kPlenty}, profile()).device_peak_bytes;
}

TEST(PlacementPlan, EverythingGoesOnTheDeviceWhenItFits) {
  const PlanInput input = small_input(4, 2);
  const PlannedStep planned = make_placement(input, {kPlenty, kPlenty}, {}, profile());
  for (const ParamPlacement& home : planned.placement.params) {
    EXPECT_TRUE(home.resident);
    EXPECT_EQ(home.optimizer, Tier::kDevice);
  }
  EXPECT_EQ(planned.placement.wave, 2);
  EXPECT_EQ(planned.placement.activations, Tier::kDevice);
}

TEST(PlacementPlan, NeverExceedsABudgetAndIsNoSlowerWhenGivenMore) {
  const PlanInput input = small_input(8, 4);
  const PlacementPlan lean = smallest_placement(input, {});
  const size_t least = make_train_plan(input, lean).device_bytes;
  const size_t most = device_bytes(input, make_placement(input, {kPlenty, kPlenty}, {}, profile()));
  double before = 1e9;
  for (int i = 0; i <= 10; ++i) {
    const size_t budget = least + (most - least) * static_cast<size_t>(i) / 10;
    const PlannedStep planned = make_placement(input, {budget, kPlenty}, {}, profile());
    EXPECT_LE(device_bytes(input, planned), budget);
    const double seconds = simulate(input, planned.train, profile()).step_seconds;
    EXPECT_LE(seconds, before * 1.02) << "budget " << budget;
    before = seconds;
  }
}

// What the upload queue brings up in a step, of weights and of block inputs.
size_t uploaded_bytes(const PlanInput& input, const StepPlan& plan) {
  size_t bytes = 0;
  for (const PlanOp& op : plan.ops) {
    if (op.kind == OpKind::kUploadParam) bytes += input.shard_param_bytes(op.param);
    if (op.kind == OpKind::kUploadInput) bytes += input.activation_bytes();
  }
  return bytes;
}

// Device memory that there is more of saves traffic: on a GPU the states of whole blocks go there
// in the end, elsewhere their weights alone.
TEST(PlacementPlan, WithMoreDeviceMemoryLessIsBroughtUp) {
  for (const bool is_host : {false, true}) {
    PlanInput input = small_input(8, 4);
    input.device_is_host = is_host;
    size_t weights = 0;
    for (size_t param = 0; param < input.layout.flat_params.size(); ++param)
      weights += input.shard_param_bytes(static_cast<int>(param));
    PlacementConfig wanted;
    wanted.wave = 4;
    const size_t least = make_train_plan(input, smallest_placement(input, wanted)).device_bytes;
    const size_t most =
        device_bytes(input, make_placement(input, {kPlenty, kPlenty}, wanted, profile()));
    std::vector<size_t> uploads;
    for (size_t i = 0; i <= 10; ++i) {
      const size_t budget = least + (most - least) * i / 10;
      const PlannedStep planned = make_placement(input, {budget, kPlenty}, wanted, profile());
      uploads.push_back(uploaded_bytes(input, planned.train));
      EXPECT_LE(uploads.back(), uploads[i > 0 ? i - 1 : 0]) << i * 10 << " %, host " << is_host;
    }
    EXPECT_GT(uploads.front(), weights);
    EXPECT_EQ(uploads.back(), is_host ? weights : 0);
    std::sort(uploads.begin(), uploads.end());
    EXPECT_GE(std::unique(uploads.begin(), uploads.end()) - uploads.begin(), 4) << "in steps";
  }
}

TEST(PlacementPlan, ShortHostMemoryMovesOptimizerShardsToTheDevice) {
  const PlanInput input = small_input(8, 4);
  const size_t need = make_train_plan(input, smallest_placement(input, {})).host_bytes;
  const PlannedStep planned = make_placement(input, {kPlenty, need / 2}, {}, profile());
  EXPECT_LE(planned.train.host_bytes, need / 2);
  EXPECT_EQ(planned.placement.params[0].optimizer, Tier::kDevice);
}

TEST(PlacementPlan, RefusalNamesNeedBudgetAndShortage) {
  const PlanInput input = small_input(4, 1);
  const size_t least = make_train_plan(input, smallest_placement(input, {})).device_bytes;
  try {
    make_placement(input, {least - 1, kPlenty}, {}, profile());
    FAIL() << "a budget one byte too small was accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kDoesNotFit);
    EXPECT_THAT(error.what(), HasSubstr(std::to_string(least)));
    EXPECT_THAT(error.what(), HasSubstr("short by 1 B"));
    EXPECT_THAT(error.what(), HasSubstr("of it gradients, fp32 "));
    EXPECT_THAT(error.what(), HasSubstr("of it block workspace "));
    EXPECT_THAT(error.what(), Not(HasSubstr("masters and moments"))) << "of the host alone";
  }
  EXPECT_NO_THROW(make_placement(input, {least, kPlenty}, {}, profile()));
}

TEST(PlacementPlan, WantedSettingsAreTakenAsTheyAre) {
  const PlanInput input = small_input(4, 4);
  PlacementConfig wanted;
  wanted.prefetch_depth = 3;
  wanted.resident_blocks = 2;
  wanted.device_optimizer_blocks = 1;
  wanted.activations = Tier::kHost;
  wanted.wave = 2;
  const PlacementPlan plan = make_placement(input, {kPlenty, kPlenty}, wanted, profile()).placement;
  EXPECT_EQ(plan.prefetch_depth, 3);
  EXPECT_EQ(plan.wave, 2);
  EXPECT_EQ(plan.activations, Tier::kHost);
  EXPECT_EQ(plan.params[0].optimizer, Tier::kDevice);
  EXPECT_EQ(plan.params[1].optimizer, Tier::kHost);
  EXPECT_TRUE(plan.params[4].resident);  // the last layer
  EXPECT_TRUE(plan.params[3].resident);
  EXPECT_FALSE(plan.params[2].resident);
}

TEST(PlacementPlan, WantedSettingsOutOfRangeAreRefusedByName) {
  const PlanInput input = small_input(2, 2);
  PlacementConfig wanted;
  wanted.prefetch_depth = 9;
  try {
    make_placement(input, {kPlenty, kPlenty}, wanted, profile());
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    EXPECT_THAT(error.what(), HasSubstr("prefetch_depth is 9"));
  }
}

size_t host_states(const PlanInput& input) {
  size_t bytes = 0;
  for (size_t param = 0; param < input.layout.flat_params.size(); ++param)
    bytes += input.state_bytes(static_cast<int>(param));
  return bytes;
}

PlanInput large_input() {
  PlanInput input = small_input(8, 1);
  for (FlatParamLayout& flat : input.layout.flat_params) flat.numel *= 64;
  input.device_is_host = true;
  return input;
}

// The less host memory, the more is on the drives: optimizer states of the last blocks first, then
// of all, then compute copies.
TEST(PlacementPlan, ShortHostMemoryMovesStatesToTheDrives) {
  const PlanInput input = large_input();
  const size_t states = host_states(input);
  int swapped_before = 0;
  int copies_before = 0;
  for (const size_t percent : {130u, 100u, 75u, 50u, 40u, 33u, 28u}) {
    const Budgets budgets{size_t{4} << 30, states * percent / 100, size_t{4} << 30};
    const PlannedStep planned = make_placement(input, budgets, {}, profile());
    EXPECT_LE(std::max(planned.train.host_bytes, planned.eval.host_bytes), budgets.host_bytes);
    const PlanReport report = make_report(input, planned, budgets, profile());
    EXPECT_GE(report.nvme_optimizer_blocks, swapped_before) << percent << " %";
    EXPECT_GE(report.nvme_param_blocks, copies_before) << percent << " %";
    EXPECT_EQ(report.nvme_optimizer_blocks > 0, percent < 130);
    EXPECT_TRUE(report.nvme_param_blocks == 0 || report.nvme_optimizer_blocks == report.blocks);
    EXPECT_EQ(report.nvme_bytes, planned.train.nvme_bytes);
    swapped_before = report.nvme_optimizer_blocks;
    copies_before = report.nvme_param_blocks;
    const int last = report.blocks - 1;
    if (report.nvme_optimizer_blocks > 0) {
      EXPECT_EQ(planned.placement.params[static_cast<size_t>(last)].optimizer, Tier::kNvme);
    }
  }
  EXPECT_GT(copies_before, 0);
}

// What stays in host memory is as much as fits: one more chunk would not.
TEST(PlacementPlan, HostMemoryIsUsedToItsLastChunk) {
  const PlanInput input = large_input();
  const size_t states = host_states(input);
  const size_t layer = input.state_bytes(1);
  int split = 0;
  for (size_t percent = 120; percent >= 30; percent -= 10) {
    const Budgets budgets{size_t{4} << 30, states * percent / 100, size_t{4} << 30};
    const PlannedStep planned = make_placement(input, budgets, {}, profile());
    const PlacementPlan& plan = planned.placement;
    if (!plan.uses_nvme()) continue;
    const size_t chunk = static_cast<size_t>(plan.chunk_numel) * input.state_bytes_per_element();
    const size_t host = std::max(planned.train.host_bytes, planned.eval.host_bytes);
    EXPECT_LE(host, budgets.host_bytes);
    EXPECT_LE(budgets.host_bytes - host, chunk) << percent << " %";
    for (const ParamPlacement& home : plan.params)
      split += home.host_chunks > 0 || home.host_copies > 0 ? 1 : 0;
    EXPECT_LT(chunk, layer) << "a chunk is less than a block";
  }
  EXPECT_GE(split, 3);
}

size_t slot_bytes(const PlannedStep& planned) {
  size_t bytes = 0;
  for (const int slot : planned.train.swap_slots)
    bytes += planned.train.buffers[static_cast<size_t>(slot)].bytes;
  return bytes;
}

// What states pass through on their way is small beside what stays, for models and budgets of every
// size, and whether the planner chose what goes to the drives or was told.
TEST(PlacementPlan, SwapSlotsTakeAQuarterOfHostMemoryAtMost) {
  for (const int64_t larger : {1, 1024}) {
    PlanInput input = large_input();
    for (FlatParamLayout& flat : input.layout.flat_params) flat.numel *= larger;
    const size_t states = host_states(input);
    PlacementConfig told;
    told.nvme_optimizer_share = told.nvme_param_share = 1;
    for (const PlacementConfig& wanted : {PlacementConfig{}, told}) {
      for (const size_t percent : {60u, 30u}) {
        const Budgets budgets{states, states * percent / 100, 2 * states};
        const PlannedStep planned = make_placement(input, budgets, wanted, profile());
        EXPECT_LE(std::max(planned.train.host_bytes, planned.eval.host_bytes), budgets.host_bytes);
        EXPECT_GT(slot_bytes(planned), 0u) << percent << " %";
        EXPECT_LE(slot_bytes(planned), budgets.host_bytes / 4)
            << percent << " % of " << states << " B of states";
        EXPECT_LE(planned.train.ops.size(), 100'000u) << "the plan stays small";
      }
    }
  }
}

// What is told to be on the drives passes through smaller slots where host memory is short; one
// byte less than that needs is refused, and the refusal says so.
TEST(PlacementPlan, SlotsShrinkAsFarAsTheyMustForWhatIsTold) {
  const PlanInput input = large_input();
  PlacementConfig wanted;
  wanted.nvme_optimizer_share = wanted.nvme_param_share = 1;
  Budgets budgets{size_t{4} << 30, 0, size_t{4} << 30};
  size_t need = 0;
  try {
    make_placement(input, budgets, wanted, profile());
  } catch (const Error& error) {
    const std::string text = error.what();
    need = std::stoull(text.substr(text.find('(', text.find("host: needs at least")) + 1));
  }
  ASSERT_GT(need, 0u);
  budgets.host_bytes = need;
  const PlannedStep planned = make_placement(input, budgets, wanted, profile());
  EXPECT_LE(std::max(planned.train.host_bytes, planned.eval.host_bytes), need);
  budgets.host_bytes = need - 1;
  EXPECT_THROW(make_placement(input, budgets, wanted, profile()), Error);
}

TEST(PlacementPlan, WantedSharesAreThoseOfEveryBlock) {
  const PlanInput input = large_input();
  PlacementConfig wanted;
  wanted.nvme_optimizer_share = 0.5;
  wanted.nvme_param_share = 0.25;
  wanted.swap_chunk = 16 * kChunkGranule;
  const Budgets budgets{size_t{4} << 30, size_t{4} << 30, size_t{4} << 30};
  const PlannedStep planned = make_placement(input, budgets, wanted, profile());
  for (size_t i = 0; i < planned.placement.params.size(); ++i) {
    const ParamPlacement& home = planned.placement.params[i];
    const int chunks = planned.placement.chunk_count(input.shard_numel(static_cast<int>(i)));
    EXPECT_EQ(home.optimizer, Tier::kNvme) << i;
    EXPECT_EQ(home.host_chunks, chunks / 2) << i;
    EXPECT_EQ(home.host_copies, chunks - (chunks + 3) / 4) << i;
  }
  const PlanReport report = make_report(input, planned, budgets, profile());
  EXPECT_NEAR(report.nvme_optimizer_share, 0.5, 0.01);
  EXPECT_NEAR(report.nvme_param_share, 0.25, 0.01);
  wanted.nvme_optimizer_blocks = 2;
  wanted.nvme_param_blocks = 1;
  const PlacementPlan last = make_placement(input, budgets, wanted, profile()).placement;
  const size_t count = last.params.size();
  EXPECT_EQ(last.params[count - 3].optimizer, Tier::kHost);
  EXPECT_EQ(last.params[count - 2].optimizer, Tier::kNvme);
  EXPECT_EQ(last.params[count - 2].copy, Tier::kHost);
  EXPECT_GT(last.params[count - 2].host_chunks, 0);
}

TEST(PlacementPlan, MoreWeightsThanStatesOnDrivesAreRefused) {
  PlacementConfig wanted;
  wanted.nvme_optimizer_share = 0.3;
  wanted.nvme_param_share = 0.4;
  try {
    make_placement(large_input(), {kPlenty, kPlenty, kPlenty}, wanted, profile());
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUsage);
    EXPECT_THAT(error.what(), HasSubstr("nvme_param_share is 0.4"));
  }
}

// With all states there and host memory still short, block inputs go, too; as many as fit stay.
TEST(PlacementPlan, BlockInputsGoToTheDrivesLast) {
  PlanInput input = large_input();
  input.micro_batches = 4;
  input.shape = {65536, 65536};
  PlacementConfig wanted;
  wanted.wave = 4;
  const size_t inputs = 8 * 4 * input.activation_bytes();
  const Budgets plenty{size_t{4} << 30, size_t{16} << 30, size_t{16} << 30};
  wanted.activations = Tier::kHost;
  wanted.nvme_optimizer_share = wanted.nvme_param_share = 1;
  const size_t least = make_train_plan(input, smallest_placement(input, wanted)).host_bytes;
  wanted.activations = {};
  wanted.nvme_optimizer_share = wanted.nvme_param_share = {};
  Budgets budgets = plenty;
  budgets.device_bytes = make_train_plan(input, smallest_placement(input, wanted)).device_bytes;
  EXPECT_EQ(make_placement(input, budgets, wanted, profile()).placement.activations, Tier::kHost);
  budgets.host_bytes = least - inputs / 2;
  const PlannedStep planned = make_placement(input, budgets, wanted, profile());
  EXPECT_EQ(planned.placement.activations, Tier::kNvme);
  EXPECT_LE(planned.train.host_bytes, budgets.host_bytes);
  EXPECT_LE(
      budgets.host_bytes - planned.train.host_bytes,
      std::max(input.activation_bytes(), static_cast<size_t>(planned.placement.chunk_numel) * 12))
      << "host memory is used";
  const PlanReport report = make_report(input, planned, budgets, profile());
  EXPECT_EQ(report.activations, Tier::kNvme);
  size_t on_drives = 0;
  for (const PlanLine& line : report.lines) {
    if (line.tier == Tier::kNvme && line.purpose == "block inputs") on_drives = line.bytes;
  }
  EXPECT_EQ(on_drives, static_cast<size_t>(32 - planned.placement.host_inputs) *
                           input.drive_activation_bytes());
  EXPECT_GE(report.nvme_written_bytes, on_drives);
  budgets.nvme_bytes = planned.train.nvme_bytes - on_drives;
  EXPECT_THROW(make_placement(input, budgets, wanted, profile()), Error);

  // Those that are told to be there all are.
  wanted.activations = Tier::kNvme;
  budgets = plenty;
  const PlannedStep told = make_placement(input, budgets, wanted, profile());
  EXPECT_EQ(told.placement.host_inputs, 0);
  EXPECT_EQ(told.train.nvme_bytes, 32 * input.drive_activation_bytes());
}

TEST(PlacementPlan, TheShortageOfEveryTierIsNamed) {
  const PlanInput input = large_input();
  try {
    make_placement(input, {size_t{4} << 30, host_states(input) / 20, size_t{1} << 20}, {},
                   profile());
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kDoesNotFit);
    EXPECT_THAT(error.what(), HasSubstr("host: needs at least"));
    EXPECT_THAT(error.what(), HasSubstr("of it gradients, waiting for the norm "));
    EXPECT_THAT(error.what(), HasSubstr("of it states, between drive and update "));
    EXPECT_THAT(error.what(), HasSubstr("nvme: needs at least"));
    EXPECT_THAT(error.what(), HasSubstr("of it masters and moments "));
  }
}

// Where there are drives and host memory for all, nothing is written to them.
TEST(PlacementPlan, DrivesAreUsedOnlyWhereHostMemoryIsShort) {
  const PlanInput input = large_input();
  const PlannedStep planned =
      make_placement(input, {size_t{4} << 30, size_t{4} << 30, size_t{4} << 30}, {}, profile());
  EXPECT_FALSE(planned.placement.uses_nvme());
}

// Who holds what adds up to all that is taken, wherever states are.
TEST(PlanReport, LinesAddUpToWhatEveryTierTakes) {
  const PlanInput input = large_input();
  const size_t states = host_states(input);
  for (const size_t percent : {200u, 100u, 50u, 30u}) {
    const Budgets budgets{states, states * percent / 100, 2 * states};
    const PlannedStep planned = make_placement(input, budgets, {}, profile());
    const PlanReport report = make_report(input, planned, budgets, profile());
    size_t device = 0;
    size_t host = 0;
    size_t nvme = 0;
    for (const PlanLine& line : report.lines) {
      EXPECT_GT(line.bytes, 0u) << line.purpose;
      (line.tier == Tier::kDevice ? device : line.tier == Tier::kHost ? host : nvme) += line.bytes;
    }
    EXPECT_EQ(device, report.device_peak_bytes) << percent << " %";
    EXPECT_EQ(host, report.host_bytes) << percent << " %";
    EXPECT_EQ(nvme, report.nvme_bytes) << percent << " %";
    EXPECT_EQ(nvme > 0, percent <= 100) << percent << " %";
  }
}

TEST(PlanReport, HostBytesPerParameterAreFourteenWithClipping) {
  const PlanInput input = small_input(8, 1);
  PlacementConfig wanted;
  wanted.device_optimizer_blocks = 0;
  const PlannedStep planned = make_placement(input, {kPlenty, kPlenty}, wanted, profile());
  const PlanReport report = make_report(input, planned, {kPlenty, kPlenty}, profile());
  size_t states = 0;
  for (const PlanLine& line : report.lines) {
    if (line.tier != Tier::kHost) continue;
    if (line.purpose == "masters and moments" ||
        line.purpose == "gradients, waiting for the norm") {
      states += line.bytes;
    }
  }
  EXPECT_EQ(states, static_cast<size_t>(input.layout.numel()) * 14);
}

}  // namespace
}  // namespace orlop

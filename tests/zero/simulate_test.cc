#include "zero/simulate.h"

#include <gtest/gtest.h>

#include "model/block.h"
#include "tests/zero/plan_input.h"

namespace orlop {
namespace {

using test::small_input;

HardwareProfile machine(double link, double host) {
  HardwareProfile profile;
  profile.matmul_flop_per_s = 1e9;
  profile.upload_bytes_per_s = link;
  profile.offload_bytes_per_s = link;
  profile.device_bytes_per_s = 1e15;
  profile.host_bytes_per_s = host;
  profile.launch_seconds = 0;
  return profile;
}

Simulation run(int prefetch, const HardwareProfile& profile) {
  const PlanInput input = small_input(6, 2);
  PlacementPlan placement;
  placement.params.resize(input.layout.flat_params.size());
  placement.prefetch_depth = prefetch;
  placement.wave = 2;
  return simulate(input, make_train_plan(input, placement), profile);
}

TEST(Simulate, AFastMachineIsBoundByCompute) {
  const Simulation result = run(1, machine(1e15, 1e15));
  // 8 blocks and 2 micro-batches of 1e6 FLOP: forward once (the head never), backward thrice.
  EXPECT_NEAR(result.step_seconds, 2 * (7 + 3 * 8) * 1e6 / 1e9, 1e-6);
}

// `bench_step --gpus 4 --shape l7` on four NVIDIA H200, 2026-11-28, and what `orlop doctor
// --measure` found there: one device alone needs 1.453 s for 16,384 tokens and 5.698 s for 65,536.
TEST(Simulate, ComputesAsLongAsWasMeasured) {
  TransformerConfig model;
  model.model_type = "llama";
  model.vocab_size = 32000;
  model.hidden = 4096;
  model.layers = 32;
  model.heads = model.kv_heads = 32;
  model.head_dim = 128;
  model.intermediate = 11008;
  PlanInput input;
  input.layout = make_layout(model);
  input.shape = {16384, 2048};
  for (const BlockLayout& block : input.layout.blocks) {
    input.forward_flops.push_back(block_forward_flops(model, block.kind, input.shape));
    input.attention_flops.push_back(block_attention_flops(model, block.kind, input.shape));
    input.forward_bytes.push_back(
        block_forward_bytes(model, block.kind, input.shape, DType::kBF16));
  }
  HardwareProfile h200;
  h200.matmul_flop_per_s = 711e12;
  h200.device_bytes_per_s = 3176e9;
  h200.launch_seconds = 1.7e-6;
  double seconds = 0;
  for (size_t block = 0; block < input.layout.blocks.size(); ++block) {
    PlanOp op;
    op.block = static_cast<int>(block);
    op.kind = OpKind::kBackward;
    seconds += op_seconds(input, {}, op, h200);
    op.kind = OpKind::kForward;  // the head's is part of its backward
    if (input.layout.blocks[block].kind != BlockKind::kHead) {
      seconds += op_seconds(input, {}, op, h200);
    }
  }
  EXPECT_NEAR(seconds, 1.453, 0.05 * 1.453);
  EXPECT_NEAR(4 * seconds, 5.698, 0.05 * 5.698);
}

TEST(HardwareProfile, RanksOfAMachineShareWhatWasMeasuredOfAllOfIt) {
  HardwareProfile whole = machine(1e10, 1e11);
  whole.nvme_read_bytes_per_s = whole.nvme_write_bytes_per_s = 4e9;
  const HardwareProfile typical = share_of_machine(whole, 4, true);
  EXPECT_EQ(typical.host_bytes_per_s, 1e11) << "typical figures are of a rank's own cores";
  EXPECT_EQ(typical.nvme_read_bytes_per_s, 1e9);
  whole.is_measured = true;
  const HardwareProfile beside_gpus = share_of_machine(whole, 4, false);
  EXPECT_EQ(beside_gpus.host_bytes_per_s, 1e11 / 4);
  EXPECT_EQ(beside_gpus.upload_bytes_per_s, 1e10);
  EXPECT_EQ(beside_gpus.matmul_flop_per_s, 1e9);
  EXPECT_EQ(share_of_machine(whole, 4, true).matmul_flop_per_s, 1e9 / 4);
}

TEST(Simulate, PrefetchHidesUploads) {
  const HardwareProfile profile = machine(1e8, 1e15);
  EXPECT_LT(run(1, profile).step_seconds, run(0, profile).step_seconds * 0.95);
}

TEST(Simulate, ASlowUpdateHidesUnderTheForwardAsFarAsItFits) {
  const Simulation fast = run(1, machine(1e15, 1e15));
  const Simulation hidden = run(1, machine(1e15, 6e9));
  const Simulation exposed = run(1, machine(1e15, 1e8));
  EXPECT_LT(hidden.step_seconds, fast.step_seconds + 0.5 * hidden.optimizer_seconds);
  EXPECT_GT(exposed.step_seconds, exposed.optimizer_seconds);
}

SaveSimulation save_beside(double drive, size_t snapshot_bytes, bool wait_for_norm = true) {
  PlanInput input = small_input(6, 2);
  input.snapshot_bytes = snapshot_bytes;
  input.updates_wait_for_norm = wait_for_norm;
  PlacementPlan placement;
  placement.params.resize(input.layout.flat_params.size());
  placement.wave = 2;
  HardwareProfile profile = machine(1e15, 1e15);
  profile.nvme_write_bytes_per_s = drive;
  return simulate_save(input, make_train_plan(input, placement), profile);
}

// Forward and backward take 62 ms, the states are 3.1 MB.
TEST(SimulateSave, DelaysStepsByWhatTheDriveIsTooSlowFor) {
  const SaveSimulation fast = save_beside(1e12, 0);
  EXPECT_NEAR(static_cast<double>(fast.bytes), 3.1e6, 0.1e6);
  EXPECT_NEAR(fast.stall_seconds, 0, 1e-6);
  EXPECT_NEAR(save_beside(1e8, 0).stall_seconds, 0, 1e-6) << "31 ms hide under the next step";
  // 310 ms do not: the last update comes when all is written, under the forward of the step after.
  const SaveSimulation slow = save_beside(1e7, 0);
  EXPECT_LT(slow.stall_seconds, slow.seconds - 0.062);
  EXPECT_GT(slow.stall_seconds, slow.seconds - 2 * 0.062);
  // Updates inside backward are asked for earlier.
  EXPECT_GE(save_beside(1e8, 0, false).stall_seconds, save_beside(1e8, 0).stall_seconds);
}

TEST(SimulateSave, ASnapshotTakesTheDelayAway) {
  const double none = save_beside(1e7, 0).stall_seconds;
  const double half = save_beside(1e7, 1600000).stall_seconds;
  EXPECT_LT(half, none);
  EXPECT_GT(half, 0.2 * none);
  EXPECT_NEAR(save_beside(1e7, 4000000).stall_seconds, 0, 1e-6);
}

// A drive reads and writes by turns: however much compute there is to hide it, no step is shorter
// than what its drives move, and a faster drive makes a step that they bound shorter.
TEST(Simulate, DrivesBoundTheStep) {
  const PlanInput input = small_input(8, 1);
  PlacementPlan plan;
  plan.params.resize(input.layout.flat_params.size(),
                     {.resident = false, .optimizer = Tier::kNvme, .copy = Tier::kNvme});
  HardwareProfile profile = default_profile({.name = "test", .is_host = true}, 2);
  profile.nvme_read_bytes_per_s = 1e8;
  profile.nvme_write_bytes_per_s = 5e7;
  const StepPlan step = make_train_plan(input, plan);
  size_t read = 0;
  size_t written = 0;
  for (const PlanOp& op : step.ops) {
    (op.kind == OpKind::kSwapOutStates ? written : read) += op.swap_bytes;
  }
  const double bound = static_cast<double>(read) / 1e8 + static_cast<double>(written) / 5e7;
  const double slow = simulate(input, step, profile).step_seconds;
  EXPECT_GE(slow, bound);
  EXPECT_LT(slow, 2 * bound);
  profile.nvme_read_bytes_per_s *= 100;
  profile.nvme_write_bytes_per_s *= 100;
  EXPECT_LT(simulate(input, step, profile).step_seconds, slow / 2);
}

// Block inputs on drives: the step takes at least what the drives need for them, and a fast drive
// hides all of it.
TEST(Simulate, BlockInputsOnDrivesBoundTheStepOrHide) {
  const PlanInput input = small_input(8, 4);
  PlacementPlan placement;
  placement.params.resize(input.layout.flat_params.size());
  placement.prefetch_depth = 1;
  placement.wave = 4;
  HardwareProfile machine;
  machine.launch_seconds = 0;
  const double on_host = simulate(input, make_train_plan(input, placement), machine).step_seconds;
  placement.activations = Tier::kNvme;
  const StepPlan plan = make_train_plan(input, placement);
  machine.nvme_read_bytes_per_s = machine.nvme_write_bytes_per_s = 1e15;
  EXPECT_NEAR(simulate(input, plan, machine).step_seconds, on_host, 0.05 * on_host);
  const double bytes = 2.0 * static_cast<double>(plan.nvme_input_bytes);
  machine.nvme_read_bytes_per_s = machine.nvme_write_bytes_per_s = bytes / (20 * on_host);
  const Simulation slow = simulate(input, plan, machine);
  EXPECT_GE(slow.step_seconds, 20 * on_host);
  EXPECT_LE(slow.step_seconds, 22 * on_host);
}

}  // namespace
}  // namespace orlop

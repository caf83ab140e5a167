#include "zero/simulate.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace orlop

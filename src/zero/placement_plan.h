#pragma once

#include <cstddef>

#include "orlop/config.h"
#include "orlop/plan.h"
#include "zero/hardware_profile.h"
#include "zero/step_plan.h"

namespace orlop {

struct Budgets {
  size_t device_bytes = 0;
  size_t host_bytes = 0;
  size_t nvme_bytes = 0;
};

// A placement with the steps that prove it fits.
struct PlannedStep {
  PlacementPlan placement;
  StepPlan train;  // empty where PlanInput::evaluates_only
  StepPlan eval;

  // What the engine is for. Every plan of an engine has its persistent buffers.
  const StepPlan& main() const { return train.ops.empty() ? eval : train; }
};

// Chooses the home of every state under hard budgets: for every wave length and home of the block
// inputs it starts from the least that can run, then spends what is left on prefetching, resident
// weights (the last blocks first: they are needed again at the turn of the pass) and optimizer
// shards on the device (accelerators only; the first blocks first: the next forward waits for
// them), in both orders; the fastest in simulation is taken. Where host memory does not suffice and
// there are drives, states go there: optimizer states of the last chunks first, then compute
// copies; where that does not suffice either, block inputs, too. What `wanted` states is taken as
// it is. Throws Error(kDoesNotFit) with need, budget and shortage per tier.
PlannedStep make_placement(const PlanInput& input, const Budgets& budgets,
                           const PlacementConfig& wanted, const HardwareProfile& profile);

// The placement with the least memory that `wanted` allows.
PlacementPlan smallest_placement(const PlanInput& input, const PlacementConfig& wanted);

// What a planned step needs and takes; model and device names are the caller's to fill in.
PlanReport make_report(const PlanInput& input, const PlannedStep& planned, const Budgets& budgets,
                       const HardwareProfile& profile);

}  // namespace orlop

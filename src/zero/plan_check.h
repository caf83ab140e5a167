#pragma once

#include "zero/step_plan.h"

namespace orlop {

// Proves a plan, independently of how it was built; throws Error(kInternal) that names the first
// operation which breaks a rule:
//   - every buffer lies inside its arena, aligned; persistent buffers overlap nothing;
//   - two operations that touch the same bytes, one of them writing, are ordered by their lanes and
//   waits;
//   - the first use of a transient buffer writes it;
//   - every block runs forward and, in training, backward once per micro-batch, on parameters that
//   were
//     brought to the device in this step or live there;
//   - in training every FlatParam's gradient is rounded once and updated once, after the norm is
//   known; states on drives chunk by chunk, each swapped in, updated and swapped out in one slot.
void plan_check(const PlanInput& input, const PlacementPlan& placement, const StepPlan& plan,
                bool training);

}  // namespace orlop

#pragma once

#include "zero/step_plan.h"

namespace orlop {

// Gives every buffer its offset in the arena of its tier. Persistent buffers first, in order; then
// the others, larger ones first, each at the lowest offset that is free for its whole lifetime. All
// offsets are multiples of kDeviceAlignment.
void assign_offsets(StepPlan& plan);

// Derives PlanOp::waits, signals and after_update: an operation waits for earlier operations of
// other lanes that touch the same bytes, unless both only read; host updates of the step before,
// which may still run, are such operations too. Needs offsets.
void derive_waits(StepPlan& plan);

}  // namespace orlop

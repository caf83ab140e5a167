#pragma once

#include "zero/step_plan.h"

namespace orlop::test {

// A Llama of the given number of layers with a tied head, hidden 64, vocabulary 512, as the planner
// sees it: micro-batches of 32 tokens.
PlanInput small_input(int layers, int micro_batches, DType dtype = DType::kBF16);

}  // namespace orlop::test

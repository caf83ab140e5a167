#pragma once

#include <string>

#include "zero/step_plan.h"

namespace orlop::test {

// A Llama of the given number of layers with a tied head, hidden 64, vocabulary 512, as the planner
// sees it: micro-batches of 32 tokens.
PlanInput small_input(int layers, int micro_batches, DType dtype = DType::kBF16);

// Everything in host memory.
PlacementPlan placement(const PlanInput& input, int prefetch, int wave);

// A change of schedule is a reviewed change of this text; ORLOP_UPDATE_GOLDEN=1 writes it anew.
void expect_golden(const std::string& text, const std::string& name);

}  // namespace orlop::test

#pragma once

#include <array>

#include "zero/hardware_profile.h"
#include "zero/step_plan.h"

namespace orlop {

// What one step of a plan takes in steady state: the step repeats, and its operations wait for the
// updates that the step before made.
struct Simulation {
  double step_seconds = 0;       // from one step's first operation to the next one's
  double optimizer_seconds = 0;  // host updates alone
  std::array<double, kPlanLanes> busy_seconds{};
  std::array<double, kPlanLanes> stall_seconds{};  // time compute waited for that lane
};

// Walks the plan on a model of the machine: lanes run their operations in order, each as soon as
// its waits are over; durations come from bytes, FLOPs and the profile.
Simulation simulate(const PlanInput& input, const StepPlan& plan, const HardwareProfile& profile);

// A save in the background, started between two steps: it writes FlatParams in the order of their
// updates, and an update waits until its FlatParam is written, or copied to the snapshot.
struct SaveSimulation {
  size_t bytes = 0;
  double seconds = 0;
  double stall_seconds = 0;  // added to the steps beside it
};

SaveSimulation simulate_save(const PlanInput& input, const StepPlan& plan,
                             const HardwareProfile& profile);

// Seconds of one operation alone.
double op_seconds(const PlanInput& input, const StepPlan& plan, const PlanOp& op,
                  const HardwareProfile& profile);

}  // namespace orlop

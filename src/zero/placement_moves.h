#pragma once

#include <vector>

#include "orlop/config.h"
#include "zero/step_plan.h"

namespace orlop {

// Throws Error(kUsage) that names the field of `wanted` that cannot be.
void check_wanted(const PlanInput& input, const PlacementConfig& wanted);

// FlatParams in the order in which they become resident: transformer layers from the last to the
// first, then the head's and the embedding's.
std::vector<int> residency_order(const ModelLayout& layout);

// The first `count` FlatParams of `order`.
void set_resident(PlacementPlan& placement, const std::vector<int>& order, int count);

// The first `count` FlatParams in order of use: the next forward waits for their updates first. The
// states of one rank are the whole weights, which so are resident; of several, a part.
void set_device_optimizer(const PlanInput& input, PlacementPlan& placement, int count);

// Chunks of all FlatParams that are not updated on the device, and may so go to drives.
int count_chunks(const PlanInput& input, const PlacementPlan& placement);

// Puts the states of the last `count` of those, in order of use, on drives, beside what is there
// already: the next forward waits for their updates last.
void set_nvme_states(const PlanInput& input, PlacementPlan& placement, int count);

// Puts the compute copies of the last `count` on drives, where the chunks' states are there, and
// those before them into host memory.
void set_nvme_copies(const PlanInput& input, PlacementPlan& placement, int count);

// What `wanted` puts on drives, or, where it leaves that open, `otherwise` (0: none; 1: all).
void set_wanted_nvme(const PlanInput& input, PlacementPlan& placement,
                     const PlacementConfig& wanted, double otherwise);
bool wants_nvme_states(const PlacementConfig& wanted);
bool wants_nvme_copies(const PlacementConfig& wanted);

}  // namespace orlop

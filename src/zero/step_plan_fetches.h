#pragma once

#include <cstddef>
#include <vector>

#include "zero/step_plan_draft.h"

namespace orlop {

// One stay of a block on the compute queue: all micro-batches of a wave go through it.
struct PlanVisit {
  int block;
  bool backward;
};

// Brings the compute copies of FlatParams to the device ahead of the visits that read them, from
// host memory, from drives and from the other ranks, and keeps them as long as the next visits need
// them.
class ParamFetches {
 public:
  explicit ParamFetches(StepPlanDraft& draft) : draft_(draft) {}

  // Plans the stays on the device during a wave. What was there before is gone, but for what is
  // resident.
  void begin_wave(const std::vector<PlanVisit>& visits);

  // Emits what brings up the copies of all visits until `visit`.
  void fetch(int visit);

  // After `visit`: what no later visit needs is not on the device any more.
  void release(int visit);

 private:
  // One stay: brought up at the turn of one visit, needed until another.
  struct Stay {
    int param;
    int first_visit;
    int last_visit;
    bool fills;           // false: this step's version is there already
    int swapped_in = -1;  // buffer in pinned memory of what came up from a drive
  };

  bool needs_params(const PlanVisit& visit) const;
  bool needs_filling(int param);
  int swap_in(int param);
  void fill_device_copy(int param, int swapped_in);

  StepPlanDraft& draft_;
  std::vector<Stay> stays_;  // of the wave, in the order of their first visits
  size_t swapped_in_ = 0;    // stays whose way from the drives has been emitted
  size_t brought_up_ = 0;    // likewise to the device
};

}  // namespace orlop

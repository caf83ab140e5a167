#pragma once

#include <cstddef>
#include <vector>

#include "zero/step_plan.h"

namespace orlop {

// A step plan while it is written: its buffers and operations, in the order in which they are
// issued, and which buffer holds what of each FlatParam at this point of the step.
class StepPlanDraft {
 public:
  // The buffers of one FlatParam; -1: none now.
  struct Param {
    int device_copy = -1;    // the compute copy on the device
    int host_copy = -1;      // likewise in pinned memory, what of it is at home there
    bool uploaded = false;   // resident: this step's version is there
    int grad = -1;           // fp32 gradient on the device
    int parked = -1;         // likewise in pinned memory
    int resident_copy = -1;  // persistent buffers
    int state = -1;          // -1: all on the drives
    int rounded = -1;  // where the rounded gradient waits for the norm, in the tier of the update
    int scalars = -1;  // its own StepScalars, where it does not wait
    int host_scalars = -1;
  };

  // Adds the persistent buffers. Both arguments outlive it.
  StepPlanDraft(const PlanInput& input, const PlacementPlan& placement);

  const PlanInput& input;
  const PlacementPlan& placement;
  StepPlan plan;

  int params() const { return static_cast<int>(params_.size()); }
  Param& param(int index) { return params_[static_cast<size_t>(index)]; }
  const Param& param(int index) const { return params_[static_cast<size_t>(index)]; }
  PlanBuffer& buffer(int index) { return plan.buffers[static_cast<size_t>(index)]; }

  int add_buffer(BufferKind kind, size_t bytes, Tier tier = Tier::kDevice, bool persistent = false);
  int add_param_buffer(BufferKind kind, int param, size_t bytes, Tier tier = Tier::kDevice,
                       bool persistent = false);
  // A buffer of a block input's size.
  int add_activation(BufferKind kind, int block, int micro_batch, Tier tier = Tier::kDevice);

  // The operation is the last one until the next is emitted; so long uses may be added.
  PlanOp& emit(OpKind kind, PlanLaneKind lane, const std::vector<BufferUse>& uses);
  void add_use(PlanOp& op, const BufferUse& use);

  // A buffer keeps its bytes at least until operation `op`.
  void keep_until(int buffer, int op);

  // Gives every buffer its place and every operation what it waits for.
  StepPlan finish();

  bool has_ranks() const { return input.world_size > 1; }
  bool is_on_device(int param) const { return home(param).optimizer == Tier::kDevice; }
  const ParamPlacement& home(int param) const {
    return placement.params[static_cast<size_t>(param)];
  }
  int blocks() const { return static_cast<int>(input.layout.blocks.size()); }
  const BlockLayout& block(int index) const {
    return input.layout.blocks[static_cast<size_t>(index)];
  }
  // The block in which a FlatParam's gradient is complete: the lowest that refers to it.
  int last_user(int param) const;

 private:
  void add_param(int index);
  void add_host_share(int index);
  void add_scalar_buffers(int index, Tier tier);

  std::vector<Param> params_;
};

}  // namespace orlop

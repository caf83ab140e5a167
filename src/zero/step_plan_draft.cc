#include "zero/step_plan_draft.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "zero/plan_memory.h"

namespace orlop {

StepPlanDraft::StepPlanDraft(const PlanInput& plan_input, const PlacementPlan& plan_placement)
    : input(plan_input), placement(plan_placement), params_(plan_input.layout.flat_params.size()) {
  plan.rope = add_buffer(BufferKind::kRope, input.rope_bytes, Tier::kDevice, true);
  if (!input.evaluates_only) {
    plan.norm_sums =
        add_buffer(BufferKind::kNormSums,
                   static_cast<size_t>(input.world_size) * norm_row_bytes(params_.size()),
                   Tier::kDevice, true);
  }
  plan.scalars = add_buffer(BufferKind::kScalars, kGatesOffset, Tier::kDevice, true);
  plan.host_scalars =
      add_buffer(BufferKind::kScalars,
                 kGatesOffset + gates_count(params_.size()) * sizeof(uint32_t), Tier::kHost, true);
  if (input.snapshot_bytes > 0) {
    plan.snapshot = add_buffer(BufferKind::kSnapshot, input.snapshot_bytes, Tier::kHost, true);
  }
  for (int i = 0; i < params(); ++i) add_param(i);
}

void StepPlanDraft::add_param(int index) {
  Param& of = param(index);
  const bool on_nvme = home(index).optimizer == Tier::kNvme;
  const Tier tier = on_nvme ? Tier::kHost : home(index).optimizer;  // of the update
  if (on_nvme) {
    add_host_share(index);
  } else {
    of.state = add_param_buffer(BufferKind::kState, index, input.state_bytes(index), tier, true);
    if (tier == Tier::kHost) of.host_copy = of.state;
  }
  add_scalar_buffers(index, tier);
  if (tier == Tier::kDevice && !has_ranks()) {
    of.resident_copy = of.state;  // the compute copy is the first plane of the states
  } else if (home(index).resident) {
    of.resident_copy =
        add_param_buffer(BufferKind::kParam, index, input.param_bytes(index), Tier::kDevice, true);
  }
}

// What of a FlatParam on drives stays in host memory.
void StepPlanDraft::add_host_share(int index) {
  const size_t copy_bytes = dtype_bytes(input.compute_dtype);
  const int64_t copies = placement.host_copy_numel(index, input.shard_numel(index));
  if (home(index).copy != Tier::kNvme || copies > 0) {
    param(index).host_copy = add_param_buffer(
        BufferKind::kParam, index, static_cast<size_t>(copies) * copy_bytes, Tier::kHost, true);
  }
  const int64_t states = placement.host_states_numel(index);
  if (states > 0) {
    param(index).state = add_param_buffer(
        BufferKind::kState, index,
        static_cast<size_t>(states) * (input.state_bytes_per_element() - copy_bytes), Tier::kHost,
        true);
  }
}

void StepPlanDraft::add_scalar_buffers(int index, Tier tier) {
  if (input.evaluates_only) return;
  Param& of = param(index);
  if (input.updates_wait_for_norm) {
    of.rounded = add_param_buffer(BufferKind::kRoundedGrad, index, input.rounded_grad_bytes(index),
                                  tier, true);
    return;
  }
  of.scalars = add_param_buffer(BufferKind::kScalars, index, kDeviceAlignment, Tier::kDevice, true);
  if (tier == Tier::kHost) {
    of.host_scalars =
        add_param_buffer(BufferKind::kScalars, index, kDeviceAlignment, Tier::kHost, true);
  }
}

int StepPlanDraft::add_buffer(BufferKind kind, size_t bytes, Tier tier, bool persistent) {
  PlanBuffer made;
  made.kind = kind;
  made.tier = tier;
  made.bytes = std::max<size_t>(bytes, kDeviceAlignment);
  made.persistent = persistent;
  plan.buffers.push_back(made);
  return static_cast<int>(plan.buffers.size()) - 1;
}

int StepPlanDraft::add_param_buffer(BufferKind kind, int param, size_t bytes, Tier tier,
                                    bool persistent) {
  const int index = add_buffer(kind, bytes, tier, persistent);
  plan.buffers.back().param = param;
  return index;
}

int StepPlanDraft::add_activation(BufferKind kind, int block, int micro_batch, Tier tier) {
  const int index = add_buffer(kind, input.activation_bytes(), tier);
  plan.buffers.back().block = block;
  plan.buffers.back().micro_batch = micro_batch;
  return index;
}

PlanOp& StepPlanDraft::emit(OpKind kind, PlanLaneKind lane, const std::vector<BufferUse>& uses) {
  PlanOp& op = plan.ops.emplace_back();
  op.kind = kind;
  op.lane = lane;
  for (const BufferUse& use : uses) add_use(op, use);
  return op;
}

void StepPlanDraft::add_use(PlanOp& op, const BufferUse& use) {
  const int index = static_cast<int>(plan.ops.size()) - 1;
  PlanBuffer& used = buffer(use.buffer);
  if (used.first_op < 0) used.first_op = index;
  used.last_op = index;
  op.uses.push_back(use);
}

void StepPlanDraft::keep_until(int index, int op) {
  buffer(index).last_op = std::max(buffer(index).last_op, op);
}

StepPlan StepPlanDraft::finish() {
  const int last = static_cast<int>(plan.ops.size()) - 1;
  for (PlanBuffer& made : plan.buffers) {
    // The host fills all staging before the first copy is issued and attention reads the sequence
    // bounds there; it reads the losses when the step is over.
    const bool on_host = made.tier == Tier::kHost;
    const bool is_staging = on_host && made.kind == BufferKind::kBatch;
    const bool is_read_at_end = on_host && made.kind == BufferKind::kLoss;
    if (made.persistent || is_staging) made.first_op = 0;
    if (made.persistent || is_staging || is_read_at_end) made.last_op = last;
  }
  assign_offsets(plan);
  derive_waits(plan);
  return std::move(plan);
}

int StepPlanDraft::last_user(int param) const {
  for (int b = 0; b < blocks(); ++b) {
    const std::vector<int>& used = block(b).flat_params;
    if (std::find(used.begin(), used.end(), param) != used.end()) return b;
  }
  fail(ErrorCode::kInternal, "FlatParam {} belongs to no block", param);
}

}  // namespace orlop

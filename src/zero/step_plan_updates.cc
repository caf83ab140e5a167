#include "zero/step_plan_updates.h"

#include <algorithm>

namespace orlop {

ParamUpdates::ParamUpdates(StepPlanDraft& draft) : draft_(draft) {
  size_t slot_bytes = 0;
  for (const int param : update_order()) {
    if (draft_.home(param).optimizer != Tier::kNvme) continue;
    for (const StateChunk& chunk : draft_.placement.chunks(draft_.input.shard_numel(param))) {
      if (!draft_.placement.states_are_on_nvme(param, chunk)) continue;
      chunks_.push_back({param, chunk});
      slot_bytes = std::max(slot_bytes, chunk_bytes(chunks_.back()));
      draft_.plan.nvme_bytes += chunk_bytes(chunks_.back());
    }
  }
  for (int slot = 0; !chunks_.empty() && slot < draft_.placement.swap_slots + 2; ++slot) {
    draft_.plan.swap_slots.push_back(
        draft_.add_buffer(BufferKind::kSwapSlot, slot_bytes, Tier::kHost, true));
    draft_.plan.buffers.back().alignment = kDriveAlignment;
  }
}

// In the order of next use, or, inside backward, in which gradients are complete.
std::vector<int> ParamUpdates::update_order() const {
  std::vector<int> order;
  if (draft_.input.updates_wait_for_norm) {
    for (int param = 0; param < draft_.params(); ++param) order.push_back(param);
    return order;
  }
  for (int b = draft_.blocks() - 1; b >= 0; --b) {
    for (const int param : draft_.block(b).flat_params) {
      if (draft_.last_user(param) == b) order.push_back(param);
    }
  }
  return order;
}

size_t ParamUpdates::chunk_bytes(const ChunkOfParam& piece) const {
  return chunk_rest_bytes(draft_.input, piece.chunk) +
         (draft_.placement.copy_is_on_nvme(piece.param, piece.chunk)
              ? chunk_copy_bytes(draft_.input, piece.chunk)
              : 0);
}

void ParamUpdates::take_gradient(int param, int grad) {
  const int summed = draft_.has_ranks() ? sum_over_ranks(param, grad) : grad;
  const int rounded = round_grad(param, summed);
  if (!draft_.input.updates_wait_for_norm) {
    update_now(param, rounded);
  } else if (!draft_.is_on_device(param)) {
    draft_
        .emit(OpKind::kOffloadGrad, PlanLaneKind::kOffload,
              {{rounded, false}, {draft_.param(param).rounded, true}})
        .param = param;
  }
}

// Returns the buffer that holds the sum of this rank's part. A gradient that travels in 16 bits
// arrives where it was in fp32, and is summed into the bytes in which it has left: those of at
// least two parts of 16 bits.
int ParamUpdates::sum_over_ranks(int param, int grad) {
  const auto emit = [&](OpKind kind, const std::vector<BufferUse>& uses) {
    draft_.emit(kind, PlanLaneKind::kComm, uses).param = param;
  };
  if (draft_.input.gradient_wire == DType::kF32) {
    emit(OpKind::kReduceScatter, {{grad, true}});
    return grad;
  }
  const int wire =
      draft_.add_param_buffer(BufferKind::kWire, param, draft_.input.wire_bytes(param));
  emit(OpKind::kNarrowGrad, {{grad, false}, {wire, true}});
  emit(OpKind::kExchangeGrad, {{wire, false}, {grad, true}});
  emit(OpKind::kSumGrad, {{grad, false}, {wire, true}});
  reduced_.push_back(grad);
  return wire;
}

// Returns the buffer that holds the rounded gradient. fp32 is read where it is, unless it has to
// wait on the device. Behind a reduction it runs on the lane of that, so that the next visit's
// compute waits for neither.
int ParamUpdates::round_grad(int param, int grad) {
  const PlanInput& input = draft_.input;
  const int scratch = draft_.add_param_buffer(BufferKind::kNormScratch, param,
                                              input.norm_scratch_bytes[static_cast<size_t>(param)]);
  std::vector<BufferUse> uses = {{grad, false}, {scratch, true}, {draft_.plan.norm_sums, true}};
  int rounded = grad;
  if (draft_.is_on_device(param) && input.updates_wait_for_norm) {
    rounded = draft_.param(param).rounded;
  } else if (input.compute_dtype != DType::kF32) {
    rounded =
        draft_.add_param_buffer(BufferKind::kRoundedGrad, param, input.rounded_grad_bytes(param));
  }
  if (rounded != grad) uses.push_back({rounded, true});
  const PlanLaneKind lane = draft_.has_ranks() ? PlanLaneKind::kComm : PlanLaneKind::kCompute;
  draft_.emit(OpKind::kRoundGrad, lane, uses).param = param;
  if (draft_.has_ranks()) reduced_.insert(reduced_.end(), {grad, scratch, rounded});
  return rounded;
}

void ParamUpdates::release_reductions() {
  const int last = static_cast<int>(draft_.plan.ops.size()) - 1;
  for (const int index : reduced_) draft_.keep_until(index, last);
  reduced_.clear();
}

// The update of one FlatParam inside backward: nothing of this step reads its weights any more.
void ParamUpdates::update_now(int param, int rounded) {
  const StepPlanDraft::Param& of = draft_.param(param);
  draft_
      .emit(OpKind::kFinishNorm, PlanLaneKind::kCompute,
            {{draft_.plan.norm_sums, false}, {of.scalars, true}})
      .param = param;
  if (draft_.is_on_device(param)) {
    emit_update(param, rounded, of.scalars);
    return;
  }
  const int host = draft_.add_param_buffer(BufferKind::kRoundedGrad, param,
                                           draft_.input.rounded_grad_bytes(param), Tier::kHost);
  keep_in_flight(host);
  draft_
      .emit(OpKind::kOffloadGrad, PlanLaneKind::kOffload,
            {{rounded, false}, {of.scalars, false}, {host, true}, {of.host_scalars, true}})
      .param = param;
  emit_update(param, host, of.host_scalars);
}

// The gradient that arrives next in host memory takes the place of the one that came
// gradients_in_flight before it; those between keep theirs.
void ParamUpdates::keep_in_flight(int host_grad) {
  const int next = static_cast<int>(draft_.plan.ops.size());
  in_flight_.push_back(host_grad);
  if (static_cast<int>(in_flight_.size()) > draft_.placement.gradients_in_flight) {
    in_flight_.pop_front();
  }
  for (const int earlier : in_flight_) draft_.keep_until(earlier, next);
}

void ParamUpdates::finish_step() {
  const StepPlan& plan = draft_.plan;
  if (draft_.has_ranks()) {
    draft_.emit(OpKind::kGatherNorms, PlanLaneKind::kComm, {{plan.norm_sums, true}});
  }
  draft_.emit(OpKind::kFinishNorm, PlanLaneKind::kCompute,
              {{plan.norm_sums, false}, {plan.scalars, true}});
  draft_.emit(OpKind::kOffloadScalars, PlanLaneKind::kOffload,
              {{plan.scalars, false}, {plan.host_scalars, true}});
  if (!draft_.input.updates_wait_for_norm) return;
  for (int param = 0; param < draft_.params(); ++param) {  // the order of next use
    emit_update(param, draft_.param(param).rounded,
                draft_.is_on_device(param) ? plan.scalars : plan.host_scalars);
  }
}

// Drives bring the first chunks of those that are to come while what is in host memory is updated.
void ParamUpdates::emit_update(int param, int grad, int scalars) {
  const StepPlanDraft::Param& of = draft_.param(param);
  const int64_t numel = draft_.input.shard_numel(param);
  if (draft_.home(param).optimizer == Tier::kDevice) {
    emit_adam(OpKind::kDeviceAdam, param, {grad, scalars, of.state}).chunk.numel = numel;
    return;
  }
  swap_in_ahead();
  const bool on_nvme = draft_.home(param).optimizer == Tier::kNvme;
  if (of.state >= 0) {
    PlanOp& adam = emit_adam(OpKind::kHostAdam, param, {grad, scalars, of.state});
    adam.chunk.numel = on_nvme ? draft_.placement.host_states_numel(param) : numel;
    if (of.host_copy != of.state) draft_.add_use(adam, {of.host_copy, true});
  }
  while (updated_ < chunks_.size() && chunks_[updated_].param == param) {
    update_chunk(grad, scalars);
  }
}

// The gradient is the operation's first use.
PlanOp& ParamUpdates::emit_adam(OpKind kind, int param, const AdamBuffers& buffers) {
  const PlanLaneKind lane =
      kind == OpKind::kDeviceAdam ? PlanLaneKind::kCompute : PlanLaneKind::kOptimizer;
  PlanOp& op = draft_.emit(
      kind, lane, {{buffers.grad, false}, {buffers.scalars, false}, {buffers.states, true}});
  op.param = param;
  return op;
}

// As many chunks are on their way in as there are slots, but for that of the chunk before the next
// one, which is on its way out.
void ParamUpdates::swap_in_ahead() {
  const size_t slots = static_cast<size_t>(draft_.placement.swap_slots);
  const size_t ahead = slots > 2 ? slots - 1 : slots;
  for (; states_in_ < std::min(chunks_.size(), updated_ + ahead); ++states_in_) {
    emit_swap(OpKind::kSwapInStates, PlanLaneKind::kStatesIn, states_in_);
  }
}

// The next chunk is updated in its slot and goes back to its drive.
void ParamUpdates::update_chunk(int grad, int scalars) {
  swap_in_ahead();
  const ChunkOfParam& piece = chunks_[updated_];
  PlanOp& adam = emit_adam(OpKind::kHostAdam, piece.param, {grad, scalars, slot_of(updated_)});
  adam.chunk = piece.chunk;
  if (!draft_.placement.copy_is_on_nvme(piece.param, piece.chunk)) {
    draft_.add_use(adam, {draft_.param(piece.param).host_copy, true});
  }
  emit_swap(OpKind::kSwapOutStates, PlanLaneKind::kStatesOut, updated_);
  ++updated_;
}

void ParamUpdates::emit_swap(OpKind kind, PlanLaneKind lane, size_t index) {
  PlanOp& op = draft_.emit(kind, lane, {{slot_of(index), kind == OpKind::kSwapInStates}});
  op.param = chunks_[index].param;
  op.chunk = chunks_[index].chunk;
  op.swap_bytes = chunk_bytes(chunks_[index]);
}

int ParamUpdates::slot_of(size_t chunk) const {
  return draft_.plan.swap_slots[chunk % static_cast<size_t>(draft_.placement.swap_slots)];
}

}  // namespace orlop

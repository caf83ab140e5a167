#include <algorithm>
#include <utility>

#include "zero/step_plan.h"
#include "zero/step_plan_draft.h"
#include "zero/step_plan_fetches.h"
#include "zero/step_plan_inputs.h"
#include "zero/step_plan_updates.h"

namespace orlop {
namespace {

// Emits the operations of one step in issue order: wave by wave, visit by visit.
class Builder {
 public:
  Builder(const PlanInput& input, const PlacementPlan& placement, int micro_batches)
      : draft_(input, placement),
        inputs_(draft_),
        fetches_(draft_),
        updates_(draft_),
        micro_batches_(micro_batches),
        activation_grads_(static_cast<size_t>(micro_batches), -1),
        parked_activation_grads_(activation_grads_) {}

  StepPlan train() {
    upload_batches();
    const int wave = draft_.placement.wave;
    for (int first = 0; first < micro_batches_; first += wave) {
      last_wave_ = first + wave >= micro_batches_;
      run_wave(first, std::min(micro_batches_, first + wave), true);
    }
    updates_.finish_step();
    return draft_.finish();
  }

  StepPlan eval() {
    upload_batches();
    run_wave(0, micro_batches_, false);
    return draft_.finish();
  }

 private:
  void upload_batches() {
    const size_t bytes = draft_.input.batch_bytes();
    for (int mb = 0; mb < micro_batches_; ++mb) {
      const int host = draft_.add_buffer(BufferKind::kBatch, bytes, Tier::kHost);
      const int device = draft_.add_buffer(BufferKind::kBatch, bytes);
      batches_.push_back(device);
      draft_
          .emit(OpKind::kUploadBatch, PlanLaneKind::kUpload,
                {{host, false},
                 {device, true},
                 {draft_.plan.scalars, true},
                 {draft_.plan.host_scalars, false}})
          .micro_batch = mb;
    }
  }

  // ---- waves and visits

  void run_wave(int begin, int end, bool backward) {
    const int blocks = draft_.blocks();
    std::vector<PlanVisit> visits;
    for (int b = 0; b < blocks - 1; ++b) visits.push_back({b, false});
    visits.push_back({blocks - 1, backward});
    // The embedding's backward pass runs once, over the whole step: see embedding_backward_visit().
    const int lowest = last_wave_ ? 0 : 1;
    for (int b = blocks - 2; backward && b >= lowest; --b) visits.push_back({b, true});
    inputs_.begin_wave(begin, end);
    wave_begin_ = begin;
    wave_end_ = end;
    fetches_.begin_wave(visits);
    for (int visit = 0; visit < static_cast<int>(visits.size()); ++visit) {
      fetches_.fetch(visit + draft_.placement.prefetch_depth);
      const PlanVisit& now = visits[static_cast<size_t>(visit)];
      if (!now.backward) {
        forward_visit(now.block, backward);
      } else if (draft_.block(now.block).kind == BlockKind::kEmbedding) {
        embedding_backward_visit(now.block);
      } else {
        backward_visit(now.block);
      }
      fetches_.release(visit);
    }
  }

  void forward_visit(int b, bool training) {
    const int workspace =
        workspace_of(draft_.input.forward_workspace_bytes[static_cast<size_t>(b)], b, false);
    for (int mb = wave_begin_; mb < wave_end_; ++mb) {
      std::vector<BufferUse> uses = block_uses(b, workspace);
      uses.push_back({batches_[static_cast<size_t>(mb)], false});
      if (b > 0) uses.push_back({inputs_.on_device(b, mb), false});
      int loss = -1;
      if (is_head(b)) {
        loss = draft_.add_buffer(BufferKind::kLoss, loss_bytes());
        uses.push_back({loss, true});
      } else {
        int& output = inputs_.on_device(b + 1, mb);
        output = draft_.add_activation(BufferKind::kInput, b + 1, mb);
        uses.push_back({output, true});
      }
      set_block(draft_.emit(OpKind::kForward, PlanLaneKind::kCompute, uses), b, mb);
      if (is_head(b)) offload_loss(loss, mb);
      if (training && !is_head(b)) inputs_.put_away(b + 1, mb);
    }
  }

  void backward_visit(int b) {
    for (const int param : draft_.block(b).flat_params) open_grad(param);
    const int workspace =
        workspace_of(draft_.input.backward_workspace_bytes[static_cast<size_t>(b)], b, true);
    inputs_.bring_back(b, wave_begin_);
    for (int mb = wave_begin_; mb < wave_end_; ++mb) {
      inputs_.bring_ahead(b, mb);
      inputs_.bring_back(b, mb);
      std::vector<BufferUse> uses = block_uses(b, workspace);
      uses.push_back({batches_[static_cast<size_t>(mb)], false});
      uses.push_back({inputs_.on_device(b, mb), false});
      int& grad = activation_grads_[static_cast<size_t>(mb)];
      int loss = -1;
      if (is_head(b)) {
        grad = draft_.add_activation(BufferKind::kActivationGrad, -1, mb);
        loss = draft_.add_buffer(BufferKind::kLoss, loss_bytes());
        uses.push_back({loss, true});
        uses.push_back({draft_.plan.scalars, false});
      }
      uses.push_back({grad, true});
      add_grads(b, uses);
      set_block(draft_.emit(OpKind::kBackward, PlanLaneKind::kCompute, uses), b, mb);
      if (is_head(b)) offload_loss(loss, mb);
      if (b == 1 && !last_wave_) park_activation_grad(mb);
    }
    updates_.release_reductions();
    for (const int param : draft_.block(b).flat_params) {
      if (!last_wave_ || draft_.last_user(param) == b) close_grad(param);
    }
  }

  // Adds the embedding's gradients of all micro-batches, in order, behind the last wave. A table
  // that the head shares has all of the head's gradients by then, so that the order of its sum, and
  // with it every bit, is the same for every length of the waves.
  void embedding_backward_visit(int b) {
    for (const int param : draft_.block(b).flat_params) open_grad(param);
    const int workspace =
        workspace_of(draft_.input.backward_workspace_bytes[static_cast<size_t>(b)], b, true);
    for (int mb = 0; mb < micro_batches_; ++mb) {
      unpark_activation_grad(mb);
      if (draft_.placement.prefetch_depth > 0) unpark_activation_grad(mb + 1);
      std::vector<BufferUse> uses = block_uses(b, workspace);
      uses.push_back({batches_[static_cast<size_t>(mb)], false});
      uses.push_back({activation_grads_[static_cast<size_t>(mb)], true});
      add_grads(b, uses);
      set_block(draft_.emit(OpKind::kBackward, PlanLaneKind::kCompute, uses), b, mb);
    }
    updates_.release_reductions();
    for (const int param : draft_.block(b).flat_params) close_grad(param);
  }

  std::vector<BufferUse> block_uses(int b, int workspace) const {
    std::vector<BufferUse> uses;
    for (const int param : draft_.block(b).flat_params) {
      const int copy = draft_.param(param).device_copy;
      if (copy >= 0) uses.push_back({copy, false});
    }
    uses.push_back({workspace, true});
    if (draft_.input.rope_bytes > 0) uses.push_back({draft_.plan.rope, false});
    return uses;
  }

  void add_grads(int b, std::vector<BufferUse>& uses) const {
    for (const int param : draft_.block(b).flat_params) {
      uses.push_back({draft_.param(param).grad, true});
    }
  }

  // Neighbouring visits of one kind and direction share a workspace; the head, whose logits are
  // large, has its own.
  int workspace_of(size_t bytes, int b, bool backward) {
    const int phase = is_head(b) ? 1 : backward ? 2 : 0;
    if (phase != workspace_phase_ || bytes > draft_.buffer(workspace_).bytes) {
      workspace_ = draft_.add_buffer(BufferKind::kWorkspace, bytes);
      workspace_phase_ = phase;
    }
    return workspace_;
  }

  // ---- losses

  void offload_loss(int loss, int mb) {
    const int host = draft_.add_buffer(BufferKind::kLoss, loss_bytes(), Tier::kHost);
    draft_.emit(OpKind::kOffloadLoss, PlanLaneKind::kOffload, {{loss, false}, {host, true}})
        .micro_batch = mb;
  }

  // ---- gradients of activations and parameters

  void park_activation_grad(int mb) {
    int& grad = activation_grads_[static_cast<size_t>(mb)];
    int& parked = parked_activation_grads_[static_cast<size_t>(mb)];
    parked = draft_.add_activation(BufferKind::kActivationGrad, -1, mb, Tier::kHost);
    draft_.emit(OpKind::kParkGrad, PlanLaneKind::kOffload, {{grad, false}, {parked, true}})
        .micro_batch = mb;
    grad = -1;
  }

  void unpark_activation_grad(int mb) {
    if (mb >= micro_batches_ || parked_activation_grads_[static_cast<size_t>(mb)] < 0) return;
    const int parked = std::exchange(parked_activation_grads_[static_cast<size_t>(mb)], -1);
    int& grad = activation_grads_[static_cast<size_t>(mb)];
    grad = draft_.add_activation(BufferKind::kActivationGrad, -1, mb);
    draft_.emit(OpKind::kUnparkGrad, PlanLaneKind::kUpload, {{parked, false}, {grad, true}})
        .micro_batch = mb;
  }

  void open_grad(int param) {
    StepPlanDraft::Param& of = draft_.param(param);
    if (of.grad >= 0) return;
    of.grad = draft_.add_param_buffer(BufferKind::kGrad, param, draft_.input.grad_bytes(param));
    if (of.parked < 0) {
      draft_.emit(OpKind::kZeroGrad, PlanLaneKind::kCompute, {{of.grad, true}}).param = param;
    } else {
      draft_.emit(OpKind::kUnparkGrad, PlanLaneKind::kUpload, {{of.parked, false}, {of.grad, true}})
          .param = param;
    }
  }

  void close_grad(int param) {
    StepPlanDraft::Param& of = draft_.param(param);
    const int grad = std::exchange(of.grad, -1);
    if (last_wave_) {
      updates_.take_gradient(param, grad);
      return;
    }
    if (of.parked < 0) {
      of.parked = draft_.add_param_buffer(BufferKind::kGrad, param, draft_.input.grad_bytes(param),
                                          Tier::kHost);
    }
    draft_.emit(OpKind::kParkGrad, PlanLaneKind::kOffload, {{grad, false}, {of.parked, true}})
        .param = param;
  }

  // ---- small helpers

  bool is_head(int b) const { return draft_.block(b).kind == BlockKind::kHead; }
  size_t loss_bytes() const { return static_cast<size_t>(draft_.input.shape.rows) * sizeof(float); }
  static void set_block(PlanOp& op, int b, int mb) {
    op.block = b;
    op.micro_batch = mb;
  }

  StepPlanDraft draft_;
  BlockInputs inputs_;
  ParamFetches fetches_;
  ParamUpdates updates_;
  int micro_batches_;
  std::vector<int> batches_;                  // [micro-batch] buffer on the device
  std::vector<int> activation_grads_;         // [micro-batch] on the device
  std::vector<int> parked_activation_grads_;  // likewise, in pinned memory between waves
  int wave_begin_ = 0;
  int wave_end_ = 0;
  bool last_wave_ = true;
  int workspace_ = -1;
  int workspace_phase_ = -1;
};

}  // namespace

StepPlan make_train_plan(const PlanInput& input, const PlacementPlan& placement) {
  return Builder(input, placement, input.micro_batches).train();
}

StepPlan make_eval_plan(const PlanInput& input, const PlacementPlan& placement) {
  return Builder(input, placement, 1).eval();
}

}  // namespace orlop

#include <algorithm>
#include <deque>
#include <utility>

#include "base/bytes.h"
#include "base/check.h"
#include "zero/plan_memory.h"
#include "zero/step_plan.h"

namespace orlop {
namespace {

// One stay of a block on the compute queue: all micro-batches of a wave go through it.
struct Visit {
  int block;
  bool backward;
};

// Emits the operations of one step in issue order.
class Builder {
 public:
  Builder(const PlanInput& input, const PlacementPlan& placement, int micro_batches)
      : input_(input), placement_(placement), micro_batches_(micro_batches) {
    for (size_t i = 0; i < input.layout.flat_params.size(); ++i) params_.emplace_back();
    activation_grads_.assign(static_cast<size_t>(micro_batches), -1);
    parked_activation_grads_ = activation_grads_;
    add_persistent_buffers();
  }

  StepPlan train() {
    upload_batches();
    const int wave = placement_.wave;
    for (int first = 0; first < micro_batches_; first += wave) {
      last_wave_ = first + wave >= micro_batches_;
      run_wave(first, std::min(micro_batches_, first + wave), true);
    }
    finish_step();
    return finish();
  }

  StepPlan eval() {
    upload_batches();
    run_wave(0, micro_batches_, false);
    return finish();
  }

 private:
  struct ParamState {
    int device_copy = -1;    // buffer that holds the compute copy now, or -1
    int last_visit = -1;     // the visit after which it may go
    bool uploaded = false;   // resident: this step's version is there
    int grad = -1;           // fp32 gradient on the device, or -1
    int parked = -1;         // fp32 gradient in pinned memory
    int resident_copy = -1;  // persistent buffers
    int state = -1;
    int rounded = -1;  // where the rounded gradient waits for the norm, in the tier of the states
    int scalars = -1;  // its own StepScalars, where it does not wait
    int host_scalars = -1;
  };

  // ---- buffers

  int add_buffer(BufferKind kind, size_t bytes, Tier tier = Tier::kDevice,
                 bool persistent = false) {
    PlanBuffer buffer;
    buffer.kind = kind;
    buffer.tier = tier;
    buffer.bytes = std::max<size_t>(bytes, kDeviceAlignment);
    buffer.persistent = persistent;
    plan_.buffers.push_back(buffer);
    return static_cast<int>(plan_.buffers.size()) - 1;
  }

  int add_param_buffer(BufferKind kind, int param, size_t bytes, Tier tier = Tier::kDevice,
                       bool persistent = false) {
    const int index = add_buffer(kind, bytes, tier, persistent);
    plan_.buffers.back().param = param;
    return index;
  }

  int add_activation(BufferKind kind, int block, int micro_batch, Tier tier = Tier::kDevice) {
    const int index = add_buffer(kind, input_.activation_bytes(), tier);
    plan_.buffers.back().block = block;
    plan_.buffers.back().micro_batch = micro_batch;
    return index;
  }

  void add_persistent_buffers() {
    const int params = static_cast<int>(params_.size());
    rope_ = add_buffer(BufferKind::kRope, input_.rope_bytes, Tier::kDevice, true);
    sums_ = add_buffer(BufferKind::kNormSums,
                       static_cast<size_t>(input_.world_size) * norm_row_bytes(params_.size()),
                       Tier::kDevice, true);
    scalars_ = add_buffer(BufferKind::kScalars, kGatesOffset, Tier::kDevice, true);
    host_scalars_ =
        add_buffer(BufferKind::kScalars, kGatesOffset + 2 * params_.size() * sizeof(uint32_t),
                   Tier::kHost, true);
    if (input_.snapshot_bytes > 0) {
      plan_.snapshot = add_buffer(BufferKind::kSnapshot, input_.snapshot_bytes, Tier::kHost, true);
    }
    for (int param = 0; param < params; ++param) {
      ParamState& state = params_[static_cast<size_t>(param)];
      const ParamPlacement& home = placement_.params[static_cast<size_t>(param)];
      const Tier tier = home.optimizer;
      state.state =
          add_param_buffer(BufferKind::kState, param, input_.state_bytes(param), tier, true);
      add_scalar_buffers(param, tier);
      if (tier == Tier::kDevice && !has_ranks()) {
        state.resident_copy = state.state;  // the compute copy is the first plane of the states
      } else if (home.resident) {
        state.resident_copy = add_param_buffer(BufferKind::kParam, param, input_.param_bytes(param),
                                               Tier::kDevice, true);
      }
    }
  }

  void add_scalar_buffers(int param, Tier tier) {
    ParamState& state = params_[static_cast<size_t>(param)];
    if (input_.updates_wait_for_norm) {
      state.rounded = add_param_buffer(BufferKind::kRoundedGrad, param,
                                       input_.rounded_grad_bytes(param), tier, true);
      return;
    }
    state.scalars =
        add_param_buffer(BufferKind::kScalars, param, kDeviceAlignment, Tier::kDevice, true);
    if (tier == Tier::kHost) {
      state.host_scalars =
          add_param_buffer(BufferKind::kScalars, param, kDeviceAlignment, Tier::kHost, true);
    }
  }

  // ---- operations

  PlanOp& emit(OpKind kind, PlanLaneKind lane, std::vector<BufferUse> uses) {
    const int index = static_cast<int>(plan_.ops.size());
    for (const BufferUse& use : uses) {
      PlanBuffer& buffer = plan_.buffers[static_cast<size_t>(use.buffer)];
      if (buffer.first_op < 0) buffer.first_op = index;
      buffer.last_op = index;
    }
    PlanOp op;
    op.kind = kind;
    op.lane = lane;
    op.uses = std::move(uses);
    plan_.ops.push_back(std::move(op));
    return plan_.ops.back();
  }

  void upload_batches() {
    for (int mb = 0; mb < micro_batches_; ++mb) {
      const int host = add_buffer(BufferKind::kBatch, input_.batch_bytes(), Tier::kHost);
      const int device = add_buffer(BufferKind::kBatch, input_.batch_bytes());
      batches_.push_back(device);
      emit(OpKind::kUploadBatch, PlanLaneKind::kUpload,
           {{host, false}, {device, true}, {scalars_, true}, {host_scalars_, false}})
          .micro_batch = mb;
    }
  }

  // Makes sure that the compute copies of a visit's FlatParams are on the device or on their way,
  // and stay until the visit is over.
  void fetch_params(int visit_index) {
    const Visit& visit = visits_[static_cast<size_t>(visit_index)];
    if (!needs_params(visit)) return;
    for (const int param : block(visit.block).flat_params) {
      ParamState& state = params_[static_cast<size_t>(param)];
      state.last_visit = std::max(state.last_visit, visit_index);
      if (state.device_copy >= 0) continue;
      if (state.resident_copy >= 0) {
        state.device_copy = state.resident_copy;
        if (state.resident_copy == state.state || state.uploaded) continue;
        state.uploaded = true;
      } else {
        state.device_copy = add_param_buffer(BufferKind::kParam, param, input_.param_bytes(param));
      }
      fill_device_copy(param);
    }
  }

  // Every rank brings its part, from host memory or from the states on its device.
  void fill_device_copy(int param) {
    const ParamState& state = params_[static_cast<size_t>(param)];
    if (!is_on_device(param)) {
      emit(OpKind::kUploadParam, PlanLaneKind::kUpload,
           {{state.state, false}, {state.device_copy, true}})
          .param = param;
    }
    if (!has_ranks()) return;
    std::vector<BufferUse> uses = {{state.device_copy, true}};
    if (is_on_device(param)) uses.push_back({state.state, false});
    emit(OpKind::kAllGather, PlanLaneKind::kComm, std::move(uses)).param = param;
  }

  void release_params(int visit_index) {
    for (ParamState& state : params_) {
      if (state.device_copy >= 0 && state.last_visit <= visit_index) state.device_copy = -1;
    }
  }

  // A backward visit of the embedding reads no weight.
  bool needs_params(const Visit& visit) const {
    return !(visit.backward && block(visit.block).kind == BlockKind::kEmbedding);
  }

  void run_wave(int begin, int end, bool backward) {
    const int blocks = static_cast<int>(input_.layout.blocks.size());
    visits_.clear();
    for (int b = 0; b < blocks - 1; ++b) visits_.push_back({b, false});
    visits_.push_back({blocks - 1, backward});
    // The embedding's backward pass runs once, over the whole step: see embedding_backward_visit().
    const int lowest = last_wave_ ? 0 : 1;
    for (int b = blocks - 2; backward && b >= lowest; --b) visits_.push_back({b, true});
    for (ParamState& state : params_) {
      state.device_copy = -1;
      state.last_visit = -1;
    }
    inputs_.assign(static_cast<size_t>(blocks + 1),
                   std::vector<int>(static_cast<size_t>(end - begin), -1));
    host_inputs_ = inputs_;
    wave_begin_ = begin;
    wave_end_ = end;
    const int visits = static_cast<int>(visits_.size());
    int fetched = 0;
    for (int visit = 0; visit < visits; ++visit) {
      const int horizon = std::min(visits - 1, visit + placement_.prefetch_depth);
      for (; fetched <= horizon; ++fetched) fetch_params(fetched);
      const Visit& now = visits_[static_cast<size_t>(visit)];
      if (!now.backward) {
        forward_visit(visit, backward);
      } else if (block(now.block).kind == BlockKind::kEmbedding) {
        embedding_backward_visit(now.block);
      } else {
        backward_visit(visit);
      }
      release_params(visit);
    }
  }

  std::vector<BufferUse> block_uses(int block_index, int workspace) {
    std::vector<BufferUse> uses;
    for (const int param : block(block_index).flat_params) {
      const int copy = params_[static_cast<size_t>(param)].device_copy;
      if (copy >= 0) uses.push_back({copy, false});
    }
    uses.push_back({workspace, true});
    if (input_.rope_bytes > 0) uses.push_back({rope_, false});
    return uses;
  }

  void forward_visit(int visit_index, bool training) {
    const int b = visits_[static_cast<size_t>(visit_index)].block;
    const bool is_head = block(b).kind == BlockKind::kHead;
    const int workspace =
        workspace_of(input_.forward_workspace_bytes[static_cast<size_t>(b)], b, false);
    for (int mb = wave_begin_; mb < wave_end_; ++mb) {
      std::vector<BufferUse> uses = block_uses(b, workspace);
      uses.push_back({batches_[static_cast<size_t>(mb)], false});
      if (b > 0) uses.push_back({input(b, mb), false});
      int loss = -1;
      if (is_head) {
        loss = add_buffer(BufferKind::kLoss, loss_bytes());
        uses.push_back({loss, true});
      } else {
        input(b + 1, mb) = add_activation(BufferKind::kInput, b + 1, mb);
        uses.push_back({input(b + 1, mb), true});
      }
      set_block(emit(OpKind::kForward, PlanLaneKind::kCompute, std::move(uses)), b, mb);
      if (is_head) offload_loss(loss, mb);
      if (training && !is_head) offload_input(b + 1, mb);
    }
  }

  // The input of a transformer block is needed again in backward: it goes to pinned memory
  // meanwhile, unless activations stay on the device. The head's input is used at once.
  void offload_input(int b, int mb) {
    if (placement_.activations_on_device || block(b).kind == BlockKind::kHead) return;
    host_input(b, mb) = add_activation(BufferKind::kInput, b, mb, Tier::kHost);
    set_block(emit(OpKind::kOffloadInput, PlanLaneKind::kOffload,
                   {{input(b, mb), false}, {host_input(b, mb), true}}),
              b, mb);
  }

  void upload_input(int b, int mb) {
    if (b < 1 || host_input(b, mb) < 0) return;
    input(b, mb) = add_activation(BufferKind::kInput, b, mb);
    set_block(emit(OpKind::kUploadInput, PlanLaneKind::kUpload,
                   {{host_input(b, mb), false}, {input(b, mb), true}}),
              b, mb);
    host_input(b, mb) = -1;
  }

  // Brings back the input of the micro-batch after (b, mb) in the backward order, one ahead of its
  // use.
  void upload_next_input(int b, int mb) {
    if (mb + 1 < wave_end_) {
      upload_input(b, mb + 1);
    } else if (b - 1 >= 1) {
      upload_input(b - 1, wave_begin_);
    }
  }

  void backward_visit(int visit_index) {
    const int b = visits_[static_cast<size_t>(visit_index)].block;
    const bool is_head = block(b).kind == BlockKind::kHead;
    for (const int param : block(b).flat_params) open_grad(param);
    const int workspace =
        workspace_of(input_.backward_workspace_bytes[static_cast<size_t>(b)], b, true);
    if (!is_head) upload_input(b, wave_begin_);
    for (int mb = wave_begin_; mb < wave_end_; ++mb) {
      if (placement_.prefetch_depth > 0) upload_next_input(b, mb);
      if (!is_head) upload_input(b, mb);
      std::vector<BufferUse> uses = block_uses(b, workspace);
      uses.push_back({batches_[static_cast<size_t>(mb)], false});
      uses.push_back({input(b, mb), false});
      int& grad = activation_grads_[static_cast<size_t>(mb)];
      int loss = -1;
      if (is_head) {
        grad = add_activation(BufferKind::kActivationGrad, -1, mb);
        loss = add_buffer(BufferKind::kLoss, loss_bytes());
        uses.push_back({loss, true});
        uses.push_back({scalars_, false});
      }
      uses.push_back({grad, true});
      for (const int param : block(b).flat_params) {
        uses.push_back({params_[static_cast<size_t>(param)].grad, true});
      }
      set_block(emit(OpKind::kBackward, PlanLaneKind::kCompute, std::move(uses)), b, mb);
      if (is_head) offload_loss(loss, mb);
      if (b == 1 && !last_wave_) park_activation_grad(mb);
    }
    for (const int param : block(b).flat_params) {
      if (!last_wave_ || last_user(param) == b) close_grad(param);
    }
  }

  // Adds the embedding's gradients of all micro-batches, in order, behind the last wave. A table
  // that the head shares has all of the head's gradients by then, so that the order of its sum, and
  // with it every bit, is the same for every length of the waves.
  void embedding_backward_visit(int b) {
    for (const int param : block(b).flat_params) open_grad(param);
    const int workspace =
        workspace_of(input_.backward_workspace_bytes[static_cast<size_t>(b)], b, true);
    for (int mb = 0; mb < micro_batches_; ++mb) {
      unpark_activation_grad(mb);
      if (placement_.prefetch_depth > 0) unpark_activation_grad(mb + 1);
      std::vector<BufferUse> uses = block_uses(b, workspace);
      uses.push_back({batches_[static_cast<size_t>(mb)], false});
      uses.push_back({activation_grads_[static_cast<size_t>(mb)], true});
      for (const int param : block(b).flat_params) {
        uses.push_back({params_[static_cast<size_t>(param)].grad, true});
      }
      set_block(emit(OpKind::kBackward, PlanLaneKind::kCompute, std::move(uses)), b, mb);
    }
    for (const int param : block(b).flat_params) close_grad(param);
  }

  void park_activation_grad(int mb) {
    int& grad = activation_grads_[static_cast<size_t>(mb)];
    int& parked = parked_activation_grads_[static_cast<size_t>(mb)];
    parked = add_activation(BufferKind::kActivationGrad, -1, mb, Tier::kHost);
    emit(OpKind::kParkGrad, PlanLaneKind::kOffload, {{grad, false}, {parked, true}}).micro_batch =
        mb;
    grad = -1;
  }

  void unpark_activation_grad(int mb) {
    if (mb >= micro_batches_ || parked_activation_grads_[static_cast<size_t>(mb)] < 0) return;
    const int parked = std::exchange(parked_activation_grads_[static_cast<size_t>(mb)], -1);
    int& grad = activation_grads_[static_cast<size_t>(mb)];
    grad = add_activation(BufferKind::kActivationGrad, -1, mb);
    emit(OpKind::kUnparkGrad, PlanLaneKind::kUpload, {{parked, false}, {grad, true}}).micro_batch =
        mb;
  }

  void offload_loss(int loss, int mb) {
    const int host = add_buffer(BufferKind::kLoss, loss_bytes(), Tier::kHost);
    emit(OpKind::kOffloadLoss, PlanLaneKind::kOffload, {{loss, false}, {host, true}}).micro_batch =
        mb;
  }

  // The block in which a FlatParam's gradient is complete: the lowest that refers to it.
  int last_user(int param) const {
    for (size_t b = 0; b < input_.layout.blocks.size(); ++b) {
      const std::vector<int>& params = input_.layout.blocks[b].flat_params;
      if (std::find(params.begin(), params.end(), param) != params.end())
        return static_cast<int>(b);
    }
    fail(ErrorCode::kInternal, "FlatParam {} belongs to no block", param);
  }

  void open_grad(int param) {
    ParamState& state = params_[static_cast<size_t>(param)];
    if (state.grad >= 0) return;
    state.grad = add_param_buffer(BufferKind::kGrad, param, input_.grad_bytes(param));
    if (state.parked < 0) {
      emit(OpKind::kZeroGrad, PlanLaneKind::kCompute, {{state.grad, true}}).param = param;
    } else {
      emit(OpKind::kUnparkGrad, PlanLaneKind::kUpload, {{state.parked, false}, {state.grad, true}})
          .param = param;
    }
  }

  void close_grad(int param) {
    ParamState& state = params_[static_cast<size_t>(param)];
    const int grad = std::exchange(state.grad, -1);
    if (!last_wave_) {
      if (state.parked < 0) {
        state.parked =
            add_param_buffer(BufferKind::kGrad, param, input_.grad_bytes(param), Tier::kHost);
      }
      emit(OpKind::kParkGrad, PlanLaneKind::kOffload, {{grad, false}, {state.parked, true}}).param =
          param;
      return;
    }
    if (has_ranks()) {
      emit(OpKind::kReduceScatter, PlanLaneKind::kComm, {{grad, true}}).param = param;
    }
    const int rounded = round_grad(param, grad);
    if (!input_.updates_wait_for_norm) {
      update_now(param, rounded);
    } else if (!is_on_device(param)) {
      emit(OpKind::kOffloadGrad, PlanLaneKind::kOffload, {{rounded, false}, {state.rounded, true}})
          .param = param;
    }
  }

  // Returns the buffer that holds the rounded gradient. fp32 is read where it is, unless it has to
  // wait on the device.
  int round_grad(int param, int grad) {
    const ParamState& state = params_[static_cast<size_t>(param)];
    const int scratch = add_param_buffer(BufferKind::kNormScratch, param,
                                         input_.norm_scratch_bytes[static_cast<size_t>(param)]);
    std::vector<BufferUse> uses = {{grad, false}, {scratch, true}, {sums_, true}};
    int rounded = grad;
    if (is_on_device(param) && input_.updates_wait_for_norm) {
      rounded = state.rounded;
    } else if (input_.compute_dtype != DType::kF32) {
      rounded = add_param_buffer(BufferKind::kRoundedGrad, param, input_.rounded_grad_bytes(param));
    }
    if (rounded != grad) uses.push_back({rounded, true});
    emit(OpKind::kRoundGrad, PlanLaneKind::kCompute, std::move(uses)).param = param;
    return rounded;
  }

  // The update of one FlatParam inside backward: nothing of this step reads its weights any more.
  void update_now(int param, int rounded) {
    const ParamState& state = params_[static_cast<size_t>(param)];
    emit(OpKind::kFinishNorm, PlanLaneKind::kCompute, {{sums_, false}, {state.scalars, true}})
        .param = param;
    if (is_on_device(param)) {
      emit_update(param, rounded, state.scalars);
      return;
    }
    const int host = add_param_buffer(BufferKind::kRoundedGrad, param,
                                      input_.rounded_grad_bytes(param), Tier::kHost);
    keep_in_flight(host);
    emit(OpKind::kOffloadGrad, PlanLaneKind::kOffload,
         {{rounded, false}, {state.scalars, false}, {host, true}, {state.host_scalars, true}})
        .param = param;
    emit_update(param, host, state.host_scalars);
  }

  // The gradient that arrives next in host memory takes the place of the one that came
  // gradients_in_flight before it; those between keep theirs.
  void keep_in_flight(int host_grad) {
    const int next = static_cast<int>(plan_.ops.size());
    in_flight_.push_back(host_grad);
    if (static_cast<int>(in_flight_.size()) > placement_.gradients_in_flight) {
      in_flight_.pop_front();
    }
    for (const int earlier : in_flight_) {
      PlanBuffer& buffer = plan_.buffers[static_cast<size_t>(earlier)];
      buffer.last_op = std::max(buffer.last_op, next);
    }
  }

  // The gradient is the operation's first use.
  void emit_update(int param, int grad, int scalars) {
    const bool on_device = is_on_device(param);
    emit(on_device ? OpKind::kDeviceAdam : OpKind::kHostAdam,
         on_device ? PlanLaneKind::kCompute : PlanLaneKind::kOptimizer,
         {{grad, false}, {scalars, false}, {params_[static_cast<size_t>(param)].state, true}})
        .param = param;
  }

  void finish_step() {
    if (has_ranks()) emit(OpKind::kGatherNorms, PlanLaneKind::kComm, {{sums_, true}});
    emit(OpKind::kFinishNorm, PlanLaneKind::kCompute, {{sums_, false}, {scalars_, true}});
    emit(OpKind::kOffloadScalars, PlanLaneKind::kOffload,
         {{scalars_, false}, {host_scalars_, true}});
    if (!input_.updates_wait_for_norm) return;
    const int params = static_cast<int>(params_.size());
    for (int param = 0; param < params; ++param) {  // the order of next use
      emit_update(param, params_[static_cast<size_t>(param)].rounded,
                  is_on_device(param) ? scalars_ : host_scalars_);
    }
  }

  StepPlan finish() {
    const int last = static_cast<int>(plan_.ops.size()) - 1;
    for (PlanBuffer& buffer : plan_.buffers) {
      // The host fills all staging before the first copy is issued and attention reads the sequence
      // bounds there; it reads the losses when the step is over.
      const bool on_host = buffer.tier == Tier::kHost;
      const bool is_staging = on_host && buffer.kind == BufferKind::kBatch;
      const bool is_read_at_end = on_host && buffer.kind == BufferKind::kLoss;
      if (buffer.persistent || is_staging) buffer.first_op = 0;
      if (buffer.persistent || is_staging || is_read_at_end) buffer.last_op = last;
    }
    plan_.rope = rope_;
    plan_.norm_sums = sums_;
    plan_.scalars = scalars_;
    plan_.host_scalars = host_scalars_;
    assign_offsets(plan_);
    derive_waits(plan_);
    return std::move(plan_);
  }

  // ---- small helpers

  bool has_ranks() const { return input_.world_size > 1; }
  bool is_on_device(int param) const {
    return placement_.params[static_cast<size_t>(param)].optimizer == Tier::kDevice;
  }
  const BlockLayout& block(int b) const { return input_.layout.blocks[static_cast<size_t>(b)]; }
  size_t loss_bytes() const { return static_cast<size_t>(input_.shape.rows) * sizeof(float); }
  int& input(int b, int mb) {
    return inputs_[static_cast<size_t>(b)][static_cast<size_t>(mb - wave_begin_)];
  }
  int& host_input(int b, int mb) {
    return host_inputs_[static_cast<size_t>(b)][static_cast<size_t>(mb - wave_begin_)];
  }

  // Neighbouring visits of one kind and direction share a workspace; the head, whose logits are
  // large, has its own.
  int workspace_of(size_t bytes, int b, bool backward) {
    const int phase = block(b).kind == BlockKind::kHead ? 1 : backward ? 2 : 0;
    if (phase != workspace_phase_ || bytes > plan_.buffers[static_cast<size_t>(workspace_)].bytes) {
      workspace_ = add_buffer(BufferKind::kWorkspace, bytes);
      workspace_phase_ = phase;
    }
    return workspace_;
  }

  static void set_block(PlanOp& op, int b, int mb) {
    op.block = b;
    op.micro_batch = mb;
  }

  const PlanInput& input_;
  const PlacementPlan& placement_;
  int micro_batches_;
  StepPlan plan_;
  std::vector<ParamState> params_;
  std::vector<Visit> visits_;
  std::vector<int> batches_;
  std::vector<std::vector<int>> inputs_;       // [block][micro-batch of the wave] buffer
  std::vector<std::vector<int>> host_inputs_;  // likewise
  std::vector<int> activation_grads_;          // [micro-batch] on the device
  std::vector<int> parked_activation_grads_;   // likewise, in pinned memory between waves
  std::deque<int> in_flight_;                  // gradients in host memory, the oldest first
  int wave_begin_ = 0;
  int wave_end_ = 0;
  bool last_wave_ = true;
  int rope_ = -1;
  int sums_ = -1;
  int scalars_ = -1;
  int host_scalars_ = -1;
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

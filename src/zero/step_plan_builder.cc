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

// One stay of a FlatParam on the device: brought up at the turn of one visit, needed until another.
struct Fetch {
  int param;
  int first_visit;
  int last_visit;
  bool fills;  // false: this step's version is there already
};

struct ChunkOfParam {
  int param;
  StateChunk chunk;
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
    int host_copy = -1;      // likewise in pinned memory: at home there, or come up from a drive
    bool uploaded = false;   // resident: this step's version is there
    int grad = -1;           // fp32 gradient on the device, or -1
    int parked = -1;         // fp32 gradient in pinned memory
    int resident_copy = -1;  // persistent buffers
    int state = -1;          // -1: on the drives
    int rounded = -1;  // where the rounded gradient waits for the norm, in the tier of the update
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
        add_buffer(BufferKind::kScalars, kGatesOffset + (2 * params_.size() + 1) * sizeof(uint32_t),
                   Tier::kHost, true);
    if (input_.snapshot_bytes > 0) {
      plan_.snapshot = add_buffer(BufferKind::kSnapshot, input_.snapshot_bytes, Tier::kHost, true);
    }
    for (int param = 0; param < params; ++param) {
      ParamState& state = params_[static_cast<size_t>(param)];
      const ParamPlacement& home = placement_.params[static_cast<size_t>(param)];
      const bool on_nvme = home.optimizer == Tier::kNvme;
      const Tier tier = on_nvme ? Tier::kHost : home.optimizer;  // of the update
      if (on_nvme) {
        if (home.copy == Tier::kHost) {
          state.host_copy = add_param_buffer(BufferKind::kParam, param,
                                             input_.shard_param_bytes(param), Tier::kHost, true);
        }
      } else {
        state.state =
            add_param_buffer(BufferKind::kState, param, input_.state_bytes(param), tier, true);
        if (tier == Tier::kHost) state.host_copy = state.state;
      }
      add_scalar_buffers(param, tier);
      if (tier == Tier::kDevice && !has_ranks()) {
        state.resident_copy = state.state;  // the compute copy is the first plane of the states
      } else if (home.resident) {
        state.resident_copy = add_param_buffer(BufferKind::kParam, param, input_.param_bytes(param),
                                               Tier::kDevice, true);
      }
    }
    add_swap_slots();
  }

  // In the order of next use, or, inside backward, in which gradients are complete.
  std::vector<int> update_order() const {
    std::vector<int> order;
    const int params = static_cast<int>(params_.size());
    for (int param = 0; param < params; ++param) order.push_back(param);
    if (input_.updates_wait_for_norm) return order;
    order.clear();
    for (int b = static_cast<int>(input_.layout.blocks.size()) - 1; b >= 0; --b) {
      for (const int param : block(b).flat_params) {
        if (last_user(param) == b) order.push_back(param);
      }
    }
    return order;
  }

  void add_swap_slots() {
    size_t slot_bytes = 0;
    for (const int param : update_order()) {
      if (placement_.params[static_cast<size_t>(param)].optimizer != Tier::kNvme) continue;
      for (const StateChunk& chunk : placement_.chunks(input_.shard_numel(param))) {
        chunks_.push_back({param, chunk});
        slot_bytes = std::max(slot_bytes, chunk_bytes(chunks_.back()));
        plan_.nvme_bytes += chunk_bytes(chunks_.back());
      }
    }
    for (int slot = 0; !chunks_.empty() && slot < placement_.swap_slots + 2; ++slot) {
      plan_.swap_slots.push_back(add_buffer(BufferKind::kSwapSlot, slot_bytes, Tier::kHost, true));
      plan_.buffers.back().alignment = kDriveAlignment;
    }
  }

  bool copy_is_on_nvme(int param) const {
    return placement_.params[static_cast<size_t>(param)].copy == Tier::kNvme;
  }

  size_t chunk_bytes(const ChunkOfParam& piece) const {
    return chunk_rest_bytes(input_, piece.chunk) +
           (copy_is_on_nvme(piece.param) ? chunk_copy_bytes(input_, piece.chunk) : 0);
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

  PlanOp& emit(OpKind kind, PlanLaneKind lane, const std::vector<BufferUse>& uses) {
    PlanOp& op = plan_.ops.emplace_back();
    op.kind = kind;
    op.lane = lane;
    for (const BufferUse& use : uses) add_use(op, use);
    return op;
  }

  // Of the operation that was emitted last.
  void add_use(PlanOp& op, const BufferUse& use) {
    const int index = static_cast<int>(plan_.ops.size()) - 1;
    PlanBuffer& buffer = plan_.buffers[static_cast<size_t>(use.buffer)];
    if (buffer.first_op < 0) buffer.first_op = index;
    buffer.last_op = index;
    op.uses.push_back(use);
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

  // The stays on the device during a wave, in the order of their first visits: a FlatParam goes
  // once no visit needs it for which the turn of fetching has come.
  void plan_fetches() {
    fetches_.clear();
    std::vector<int> on_device(params_.size(), -1);
    const int visits = static_cast<int>(visits_.size());
    int fetched = 0;
    for (int visit = 0; visit < visits; ++visit) {
      for (; fetched <= std::min(visits - 1, visit + placement_.prefetch_depth); ++fetched) {
        const Visit& next = visits_[static_cast<size_t>(fetched)];
        if (!needs_params(next)) continue;
        for (const int param : block(next.block).flat_params) {
          int& fetch = on_device[static_cast<size_t>(param)];
          if (fetch < 0) {
            fetch = static_cast<int>(fetches_.size());
            fetches_.push_back({param, fetched, fetched, needs_filling(param)});
          }
          fetches_[static_cast<size_t>(fetch)].last_visit = fetched;
        }
      }
      for (int& fetch : on_device) {
        if (fetch >= 0 && fetches_[static_cast<size_t>(fetch)].last_visit <= visit) fetch = -1;
      }
    }
    host_copies_.assign(fetches_.size(), -1);
    swapped_in_ = 0;
    brought_up_ = 0;
  }

  // What is resident is filled once per step, what is the states themselves never.
  bool needs_filling(int param) {
    ParamState& state = params_[static_cast<size_t>(param)];
    if (state.resident_copy < 0) return true;
    return state.resident_copy != state.state && !std::exchange(state.uploaded, true);
  }

  // Issues what brings up the compute copies of all visits until `visit`; those on drives start
  // earlier by swap_ahead visits.
  void fetch_params(int visit) {
    for (; swapped_in_ < fetches_.size() &&
           fetches_[swapped_in_].first_visit <= visit + placement_.swap_ahead;
         ++swapped_in_) {
      const Fetch& fetch = fetches_[swapped_in_];
      host_copies_[swapped_in_] = fetch.fills ? swap_in_param(fetch.param) : -1;
    }
    for (; brought_up_ < fetches_.size() && fetches_[brought_up_].first_visit <= visit;
         ++brought_up_) {
      const Fetch& fetch = fetches_[brought_up_];
      ParamState& state = params_[static_cast<size_t>(fetch.param)];
      state.device_copy =
          state.resident_copy >= 0
              ? state.resident_copy
              : add_param_buffer(BufferKind::kParam, fetch.param, input_.param_bytes(fetch.param));
      if (fetch.fills) fill_device_copy(fetch.param, host_copies_[brought_up_]);
    }
  }

  // Every rank brings its part, from host memory or from the states on its device.
  void fill_device_copy(int param, int host_copy) {
    const ParamState& state = params_[static_cast<size_t>(param)];
    if (host_copy >= 0) {
      emit(OpKind::kUploadParam, PlanLaneKind::kUpload,
           {{host_copy, false}, {state.device_copy, true}})
          .param = param;
    }
    if (!has_ranks()) return;
    std::vector<BufferUse> uses = {{state.device_copy, true}};
    if (is_on_device(param)) uses.push_back({state.state, false});
    emit(OpKind::kAllGather, PlanLaneKind::kComm, uses).param = param;
  }

  // The buffer in pinned memory that holds the compute copy.
  int swap_in_param(int param) {
    if (!copy_is_on_nvme(param)) return params_[static_cast<size_t>(param)].host_copy;
    size_t bytes = 0;
    for (const StateChunk& chunk : placement_.chunks(input_.shard_numel(param))) {
      bytes += chunk_copy_bytes(input_, chunk);
    }
    const int copy = add_param_buffer(BufferKind::kParam, param, bytes, Tier::kHost);
    plan_.buffers.back().alignment = kDriveAlignment;
    PlanOp& op = emit(OpKind::kSwapInParam, PlanLaneKind::kSwapIn, {{copy, true}});
    op.param = param;
    op.swap_bytes = bytes;
    return copy;
  }

  void release_params(int visit) {
    for (size_t i = 0; i < brought_up_; ++i) {
      if (fetches_[i].last_visit == visit) {
        params_[static_cast<size_t>(fetches_[i].param)].device_copy = -1;
      }
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
    for (ParamState& state : params_) state.device_copy = -1;
    inputs_.assign(static_cast<size_t>(blocks + 1),
                   std::vector<int>(static_cast<size_t>(end - begin), -1));
    host_inputs_ = inputs_;
    wave_begin_ = begin;
    wave_end_ = end;
    plan_fetches();
    const int visits = static_cast<int>(visits_.size());
    for (int visit = 0; visit < visits; ++visit) {
      fetch_params(visit + placement_.prefetch_depth);
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
      set_block(emit(OpKind::kForward, PlanLaneKind::kCompute, uses), b, mb);
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
      set_block(emit(OpKind::kBackward, PlanLaneKind::kCompute, uses), b, mb);
      if (is_head) offload_loss(loss, mb);
      if (b == 1 && !last_wave_) park_activation_grad(mb);
    }
    release_reductions();
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
      set_block(emit(OpKind::kBackward, PlanLaneKind::kCompute, uses), b, mb);
    }
    release_reductions();
    for (const int param : block(b).flat_params) close_grad(param);
  }

  // What the last visit's reduction works on keeps its bytes through this visit, whose compute
  // would otherwise wait for the reduction before it could take them.
  void release_reductions() {
    const int last = static_cast<int>(plan_.ops.size()) - 1;
    for (const int index : reduced_) {
      PlanBuffer& buffer = plan_.buffers[static_cast<size_t>(index)];
      buffer.last_op = std::max(buffer.last_op, last);
    }
    reduced_.clear();
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
  // wait on the device. Behind a reduction it runs on the lane of that, so that the next visit's
  // compute waits for neither.
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
    const PlanLaneKind lane = has_ranks() ? PlanLaneKind::kComm : PlanLaneKind::kCompute;
    emit(OpKind::kRoundGrad, lane, uses).param = param;
    if (has_ranks()) reduced_.insert(reduced_.end(), {grad, scratch, rounded});
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

  void emit_update(int param, int grad, int scalars) {
    const int states = params_[static_cast<size_t>(param)].state;
    switch (placement_.params[static_cast<size_t>(param)].optimizer) {
      case Tier::kDevice:
        emit_adam(OpKind::kDeviceAdam, param, {grad, scalars, states});
        break;
      case Tier::kHost:
        emit_adam(OpKind::kHostAdam, param, {grad, scalars, states});
        break;
      case Tier::kNvme:
        while (updated_ < chunks_.size() && chunks_[updated_].param == param) {
          update_chunk(grad, scalars);
        }
        break;
    }
  }

  struct AdamBuffers {
    int grad;
    int scalars;
    int states;
  };

  // The gradient is the operation's first use.
  PlanOp& emit_adam(OpKind kind, int param, const AdamBuffers& buffers) {
    const PlanLaneKind lane =
        kind == OpKind::kDeviceAdam ? PlanLaneKind::kCompute : PlanLaneKind::kOptimizer;
    PlanOp& op =
        emit(kind, lane, {{buffers.grad, false}, {buffers.scalars, false}, {buffers.states, true}});
    op.param = param;
    return op;
  }

  // The next chunk is updated in its slot and goes back to its drive. The ones behind it are on
  // their way in, but for the slot of the one before it, which is on its way out.
  void update_chunk(int grad, int scalars) {
    const size_t slots = static_cast<size_t>(placement_.swap_slots);
    const size_t ahead = slots > 2 ? slots - 1 : slots;
    for (; states_in_ < std::min(chunks_.size(), updated_ + ahead); ++states_in_) {
      emit_swap(OpKind::kSwapInStates, PlanLaneKind::kStatesIn, states_in_);
    }
    const ChunkOfParam& piece = chunks_[updated_];
    PlanOp& adam = emit_adam(OpKind::kHostAdam, piece.param, {grad, scalars, slot_of(updated_)});
    adam.chunk = piece.chunk;
    const ParamState& state = params_[static_cast<size_t>(piece.param)];
    if (state.host_copy >= 0) add_use(adam, {state.host_copy, true});
    emit_swap(OpKind::kSwapOutStates, PlanLaneKind::kStatesOut, updated_);
    ++updated_;
  }

  void emit_swap(OpKind kind, PlanLaneKind lane, size_t index) {
    PlanOp& op = emit(kind, lane, {{slot_of(index), kind == OpKind::kSwapInStates}});
    op.param = chunks_[index].param;
    op.chunk = chunks_[index].chunk;
    op.swap_bytes = chunk_bytes(chunks_[index]);
  }

  int slot_of(size_t chunk) const {
    return plan_.swap_slots[chunk % static_cast<size_t>(placement_.swap_slots)];
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
  std::vector<Fetch> fetches_;        // of the wave
  std::vector<int> host_copies_;      // of fetches_: the buffer to upload from
  size_t swapped_in_ = 0;             // fetches whose way from the drives has been issued
  size_t brought_up_ = 0;             // likewise to the device
  std::vector<ChunkOfParam> chunks_;  // on the drives, in the order of their updates
  size_t states_in_ = 0;              // chunks that have been swapped in
  size_t updated_ = 0;                // and updated
  std::vector<int> batches_;
  std::vector<std::vector<int>> inputs_;       // [block][micro-batch of the wave] buffer
  std::vector<std::vector<int>> host_inputs_;  // likewise
  std::vector<int> activation_grads_;          // [micro-batch] on the device
  std::vector<int> parked_activation_grads_;   // likewise, in pinned memory between waves
  std::deque<int> in_flight_;                  // gradients in host memory, the oldest first
  std::vector<int> reduced_;                   // buffers of the last visit's reductions
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

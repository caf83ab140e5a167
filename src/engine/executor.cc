#include "engine/executor.h"

#include <algorithm>
#include <array>
#include <map>

#include "base/check.h"
#include "engine/ranks.h"
#include "zero/partition.h"

namespace orlop {
namespace {

constexpr std::array<PlanLaneKind, 4> kDeviceLanes = {PlanLaneKind::kCompute, PlanLaneKind::kUpload,
                                                      PlanLaneKind::kOffload, PlanLaneKind::kComm};
bool is_on_device(const PlanOp& op) {
  return std::find(kDeviceLanes.begin(), kDeviceLanes.end(), op.lane) != kDeviceLanes.end();
}

bool is_swap(const PlanOp& op) {
  return op.lane == PlanLaneKind::kSwapIn || op.lane == PlanLaneKind::kSwapOut;
}

}  // namespace

// Events and staging of one plan, made at its first walk.
struct Executor::PlanState {
  // Of operations that signal. Walks take turns: the optimizer may come to wait for an event of a
  // walk when the next one is under way; in that one, all updates of the first are waited for.
  std::array<std::vector<std::unique_ptr<Event>>, 2> events;
  size_t turn = 0;
  std::vector<BatchStaging> staging;  // per micro-batch
  std::vector<std::byte*> host_batches;
  std::vector<std::byte*> device_batches;
  std::vector<const float*> host_losses;
  std::vector<BatchView> batches;                         // of the walk that is under way
  std::array<std::map<size_t, SwapLane::Swap>, 2> swaps;  // by operation, for the events of a turn
  std::vector<uint32_t> tickets;  // of swaps, by operation, of the walk that is under way
  std::vector<int> updates;       // by operation: which one of the host's updates it is
};

struct Executor::Walk {
  const StepPlan& plan;
  PlanState& state;
  const WalkInput& input;
  int64_t labelled_tokens = 0;
};

Executor::Executor(Backend& backend, const PlanInput& input,
                   std::span<const std::unique_ptr<Block>> blocks, ExecutorMemory memory,
                   const BatchLimits& limits, Communicator& ranks)
    : backend_(backend),
      input_(input),
      blocks_(blocks),
      memory_(std::move(memory)),
      limits_(limits),
      ranks_(ranks) {
  ORLOP_INVARIANT(ranks.world_size() == input.world_size);
  for (auto& end : ends_) end = backend.make_event();
  for (const FlatParamLayout& flat : input.layout.flat_params)
    decay_runs_.push_back(
        decay_runs(flat, shard_range(flat.numel, ranks.rank(), input.world_size)));
  if (memory_.swap != nullptr) {
    const auto make_lane = [&](const char* name, const Gate& ended) {
      return std::make_unique<SwapLane>(name, memory_.swap->swapper(), memory_.gates,
                                        memory_.swap->versions(), ended);
    };
    swap_in_lane_ = make_lane("swap in", memory_.swapped_in);
    swap_out_lane_ = make_lane("swap out", memory_.swapped_out);
  }
}

Executor::~Executor() = default;

std::byte* Executor::address(const PlanBuffer& buffer) const {
  return (buffer.tier == Tier::kDevice ? memory_.device : memory_.host) + buffer.offset;
}

std::byte* Executor::device_scalars(const StepPlan& plan) const {
  return address(plan.buffers[static_cast<size_t>(plan.scalars)]);
}

Queue& Executor::queue_of(PlanLaneKind lane) {
  switch (lane) {
    case PlanLaneKind::kUpload:
      return backend_.queue(QueueKind::kUpload);
    case PlanLaneKind::kOffload:
      return backend_.queue(QueueKind::kOffload);
    case PlanLaneKind::kComm:
      return backend_.queue(QueueKind::kComm);
    default:
      return backend_.queue(QueueKind::kCompute);
  }
}

Executor::PlanState& Executor::prepare(const StepPlan& plan) {
  std::unique_ptr<PlanState>& slot = states_[&plan];
  if (slot) return *slot;
  slot = std::make_unique<PlanState>();
  for (auto& events : slot->events) events.resize(plan.ops.size());
  slot->tickets.resize(plan.ops.size());
  slot->updates.resize(plan.ops.size());
  int updates = 0;
  for (size_t i = 0; i < plan.ops.size(); ++i) {
    const PlanOp& op = plan.ops[i];
    for (auto& events : slot->events) {
      if (op.signals && is_on_device(op)) events[i] = backend_.make_event();
    }
    if (is_host_update(op.kind)) slot->updates[i] = updates++;
    if (op.kind == OpKind::kUploadBatch) {
      slot->staging.emplace_back(input_.shape.rows, limits_.sequence_length, limits_.vocab_size,
                                 limits_.max_positions);
      ORLOP_INVARIANT(slot->staging.back().bytes() <= input_.batch_bytes());
      slot->host_batches.push_back(
          address(plan.buffer(*find_use(plan, op, BufferKind::kBatch, Tier::kHost))));
      slot->device_batches.push_back(
          address(plan.buffer(*find_use(plan, op, BufferKind::kBatch, Tier::kDevice))));
    }
    for (size_t turn = 0; is_swap(op) && turn < slot->swaps.size(); ++turn) {
      slot->swaps[turn].emplace(i, make_swap(plan, op, slot->events[turn]));
    }
    if (op.kind == OpKind::kOffloadLoss) {
      slot->host_losses.resize(
          std::max(slot->host_losses.size(), static_cast<size_t>(op.micro_batch) + 1));
      slot->host_losses[static_cast<size_t>(op.micro_batch)] = reinterpret_cast<const float*>(
          address(plan.buffer(*find_use(plan, op, BufferKind::kLoss, Tier::kHost))));
    }
  }
  return *slot;
}

// Arena bytes change hands between steps as the next plan says; nothing of this step may start
// while a queue still works on the step before.
void Executor::order_after_previous_walk() {
  for (size_t i = 0; i < kDeviceLanes.size(); ++i) queue_of(kDeviceLanes[i]).record(*ends_[i]);
  for (const PlanLaneKind lane : kDeviceLanes) {
    for (size_t i = 0; i < kDeviceLanes.size(); ++i) {
      if (kDeviceLanes[i] != lane) queue_of(lane).wait(*ends_[i]);
    }
  }
}

WalkResult Executor::walk(const StepPlan& plan, const WalkInput& input) {
  PlanState& state = prepare(plan);
  Walk walk{plan, state, input, 0};
  walk.labelled_tokens = static_cast<int64_t>(sum_over_ranks(
      ranks_, "labelled tokens", [&] { return static_cast<double>(stage_batches(walk)); }));
  check(walk.labelled_tokens > 0, ErrorCode::kInvalidData,
        "step: no token of the {} micro-batches has a label", input.batches.size());
  *reinterpret_cast<float*>(memory_.scalars + kLossScaleOffset) =
      input.loss_scale / static_cast<float>(walk.labelled_tokens);
  state.turn = 1 - state.turn;
  order_after_previous_walk();
  for (size_t i = 0; i < plan.ops.size(); ++i) issue(walk, i);
  for (const PlanLaneKind lane : kDeviceLanes) queue_of(lane).synchronize();
  drain_swaps();

  WalkResult result;
  result.labelled_tokens = walk.labelled_tokens;
  for (size_t mb = 0; mb < input.batches.size(); ++mb) {
    const float* losses = state.host_losses[mb];
    for (int64_t row = 0; row < input_.shape.rows; ++row) result.loss_sum += losses[row];
  }
  result.micro_batches = static_cast<int64_t>(input.batches.size());
  if (ranks_.world_size() > 1) sum_results(result);
  result.scalars = *reinterpret_cast<const StepScalars*>(memory_.scalars);
  return result;
}

void Executor::sum_results(WalkResult& result) {
  std::array<double, 2> sums = {result.loss_sum, static_cast<double>(result.micro_batches)};
  ranks_.all_reduce_sum(sums, "losses");
  result.loss_sum = sums[0];
  result.micro_batches = static_cast<int64_t>(sums[1]);
}

// Returns the labelled tokens of this rank.
int64_t Executor::stage_batches(Walk& walk) {
  PlanState& state = walk.state;
  const std::span<const MicroBatch> batches = walk.input.batches;
  const size_t least = ranks_.world_size() > 1 ? 0 : 1;
  check(batches.size() >= least && batches.size() <= state.staging.size(), ErrorCode::kUsage,
        "step: {} micro-batches given; accumulation_steps allows {} to {}", batches.size(), least,
        state.staging.size());
  int64_t labelled_tokens = 0;
  state.batches.clear();
  for (size_t mb = 0; mb < batches.size(); ++mb) {
    state.staging[mb].fill(batches[mb], state.host_batches[mb], static_cast<int>(mb));
    labelled_tokens += state.staging[mb].labelled_tokens();
    BatchView view = state.staging[mb].view(state.host_batches[mb], state.device_batches[mb]);
    view.scale = reinterpret_cast<const float*>(device_scalars(walk.plan) + kLossScaleOffset);
    state.batches.push_back(view);
  }
  return labelled_tokens;
}

// The order of the queues is the plan's also where a micro-batch is missing.
void Executor::issue(Walk& walk, size_t index) {
  const PlanOp& op = walk.plan.ops[index];
  if (is_host_update(op.kind)) {
    submit_update(walk, index);
    return;
  }
  const bool is_missing = op.micro_batch >= static_cast<int>(walk.state.batches.size());
  if (is_swap(op)) {
    issue_swap(walk.plan, op, walk.state.swaps[walk.state.turn].at(index),
               {.version = walk.input.version,
                .updates = walk.input.optimizer != nullptr,
                .skips = is_missing},
               walk.state.tickets);
    return;
  }
  Queue& queue = queue_of(op.lane);
  issue_waits(walk, op, queue);
  if (!is_missing) issue_work(walk, op, queue);
  if (op.signals) queue.record(*walk.state.events[walk.state.turn][index]);
}

void Executor::issue_waits(Walk& walk, const PlanOp& op, Queue& queue) {
  const auto wait_update = [&](int param, uint32_t version) {
    if (walk.input.optimizer == nullptr) return;
    queue.wait_gate(memory_.gates[static_cast<size_t>(param)], version);
  };
  if (op.after_update >= 0) wait_update(op.after_update, walk.input.version);
  for (const int wait : op.waits) {
    const PlanOp& earlier = walk.plan.ops[static_cast<size_t>(wait)];
    if (earlier.lane == PlanLaneKind::kOptimizer) {
      wait_update(earlier.param, walk.input.version + 1);
    } else if (is_swap(earlier)) {
      queue.wait_gate(swap_lane(earlier.lane).ended(),
                      walk.state.tickets[static_cast<size_t>(wait)]);
    } else {
      queue.wait(*walk.state.events[walk.state.turn][static_cast<size_t>(wait)]);
    }
  }
}

// The optimizer's thread orders transfers and updates by the slots that they share. What moved to
// or from a drive in the bytes of a gradient was over before the gradient arrived, which is waited
// for.
void Executor::submit_update(Walk& walk, size_t index) {
  if (walk.input.optimizer == nullptr) return;
  const StepPlan& plan = walk.plan;
  const PlanOp& op = plan.ops[index];
  UpdateJob job;
  job.op = walk.state.updates[index];
  size_t arrivals = 0;
  for (const int wait : op.waits) {
    if (!is_on_device(plan.ops[static_cast<size_t>(wait)])) continue;
    job.arrivals.at(arrivals++) =
        walk.state.events[walk.state.turn][static_cast<size_t>(wait)].get();
  }
  if (const BufferUse* scalars = find_use(plan, op, BufferKind::kScalars, Tier::kHost)) {
    job.scalars = reinterpret_cast<const StepScalars*>(address(plan.buffer(*scalars)));
  }
  job.saved = memory_.saved[static_cast<size_t>(op.param)];
  job.saved_version = walk.input.save;
  job.hyper = walk.input.hyper;
  job.version = walk.input.version + 1;
  walk.input.optimizer->submit(job);
}

void Executor::issue_work(Walk& walk, const PlanOp& op, Queue& queue) {
  switch (op.kind) {
    case OpKind::kUploadBatch:
      copy(walk.plan, op, queue);
      if (op.micro_batch == 0) {
        queue.upload(device_scalars(walk.plan) + kLossScaleOffset,
                     memory_.scalars + kLossScaleOffset, sizeof(float));
      }
      break;
    case OpKind::kUploadParam:
      upload_param(walk.plan, op, queue);
      break;
    case OpKind::kUploadInput:
    case OpKind::kUnparkGrad:
    case OpKind::kOffloadInput:
    case OpKind::kParkGrad:
    case OpKind::kOffloadGrad:
    case OpKind::kOffloadLoss:
      copy(walk.plan, op, queue);
      break;
    case OpKind::kForward:
    case OpKind::kBackward:
      issue_block(walk.plan, op, walk.state.batches[static_cast<size_t>(op.micro_batch)], queue);
      break;
    case OpKind::kZeroGrad: {
      const PlanBuffer& grad = walk.plan.buffer(op.uses.front());
      queue.fill_zero(address(grad), input_.grad_bytes(op.param));
      break;
    }
    case OpKind::kRoundGrad:
      issue_round_grad(walk.plan, op, queue);
      break;
    case OpKind::kAllGather:
    case OpKind::kReduceScatter:
    case OpKind::kNarrowGrad:
    case OpKind::kExchangeGrad:
    case OpKind::kSumGrad:
    case OpKind::kGatherNorms:
      issue_between_ranks(walk.plan, op, queue);
      break;
    case OpKind::kFinishNorm:
      issue_finish_norm(walk.plan, op, walk.input, queue);
      break;
    case OpKind::kOffloadScalars:
      queue.offload(memory_.scalars, device_scalars(walk.plan), sizeof(StepScalars));
      break;
    case OpKind::kDeviceAdam:
      if (walk.input.save > 0) {
        queue.wait_gate(memory_.saved[static_cast<size_t>(op.param)], walk.input.save);
      }
      issue_device_adam(walk.plan, op, walk.input.hyper, queue);
      break;
    case OpKind::kHostAdam:
    case OpKind::kSwapInParam:
    case OpKind::kSwapInInput:
    case OpKind::kSwapOutInput:
    case OpKind::kSwapInStates:
    case OpKind::kSwapOutStates:
      break;
  }
}

}  // namespace orlop

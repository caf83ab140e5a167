#pragma once

#include <array>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "backend/backend.h"
#include "backend/ops.h"
#include "comm/communicator.h"
#include "cpu_adam/adam.h"
#include "engine/batch_staging.h"
#include "engine/swap_lane.h"
#include "engine/swap_space.h"
#include "model/block.h"
#include "optim/optimizer_queue.h"
#include "orlop/engine.h"
#include "zero/param_states.h"
#include "zero/step_plan.h"

namespace orlop {

// Where the arenas of a plan lie, and the gates of its FlatParams.
struct ExecutorMemory {
  std::byte* device = nullptr;
  std::byte* host = nullptr;
  std::byte* scalars = nullptr;  // the host's kScalars buffer
  std::vector<Gate> gates;       // one per FlatParam: version that its update has written
  std::vector<Gate> saved;       // likewise: the last save that does not read it any more
  Gate swapped_in;               // counts what has come from the drives
  Gate swapped_out;              // and what has gone there
  SwapSpace* swap = nullptr;     // null: nothing is on a drive
};

// What a micro-batch may hold.
struct BatchLimits {
  int64_t sequence_length = 0;
  int64_t vocab_size = 0;
  int64_t max_positions = 0;
};

// What one walk over a plan is told.
struct WalkInput {
  std::span<const MicroBatch> batches;
  float loss_scale = 1;
  float max_grad_norm = 0;
  uint32_t version = 0;  // of every FlatParam: what the step before made of it
  AdamHyper hyper;       // of the updates
  uint32_t save = 0;     // the save that may still read what updates write, or none
  // Runs the host updates, which make `version` + 1. Null: no host update runs, for whoever times
  // the device's work alone.
  OptimizerQueue* optimizer = nullptr;
};

// What one walk gives back, when all its device work is over: the same on all ranks.
struct WalkResult {
  double loss_sum = 0;  // over labelled tokens, in nats
  int64_t labelled_tokens = 0;
  int64_t micro_batches = 0;
  StepScalars scalars;  // training only
};

// Walks a StepPlan: issues every operation in order on its queue, with the plan's waits between
// queues. Several ranks walk the same plan together. With one, nothing is allocated after the first
// walk of a plan.
class Executor {
 public:
  Executor(Backend& backend, const PlanInput& input, std::span<const std::unique_ptr<Block>> blocks,
           ExecutorMemory memory, const BatchLimits& limits, Communicator& ranks);
  ~Executor();

  // Issues all operations, waits for the device, sums the losses. Host updates may still run when
  // this returns. Fewer micro-batches than the plan has leave out the operations of the last ones;
  // a rank may have none. Bad micro-batches of one rank are an error on all, before anything is
  // issued.
  WalkResult walk(const StepPlan& plan, const WalkInput& input);

  uint64_t uploaded_bytes() const { return uploaded_bytes_; }
  uint64_t offloaded_bytes() const { return offloaded_bytes_; }

 private:
  struct PlanState;
  struct Walk;

  PlanState& prepare(const StepPlan& plan);
  SwapLane::Swap make_swap(const StepPlan& plan, const PlanOp& op,
                           const std::vector<std::unique_ptr<Event>>& events) const;
  int64_t stage_batches(Walk& walk);
  void sum_results(WalkResult& result);
  void issue(Walk& walk, size_t index);
  void issue_waits(Walk& walk, const PlanOp& op, Queue& queue);
  void issue_work(Walk& walk, const PlanOp& op, Queue& queue);
  void issue_swap(const StepPlan& plan, const PlanOp& op, const SwapLane::Swap& swap,
                  SwapLane::Turn turn, std::vector<uint32_t>& tickets);
  void submit_update(Walk& walk, size_t index);
  void issue_block(const StepPlan& plan, const PlanOp& op, BatchView batch, Queue& queue);
  void issue_round_grad(const StepPlan& plan, const PlanOp& op, Queue& queue);
  void issue_finish_norm(const StepPlan& plan, const PlanOp& op, const WalkInput& input,
                         Queue& queue);
  void issue_device_adam(const StepPlan& plan, const PlanOp& op, const AdamHyper& hyper,
                         Queue& queue);
  void issue_between_ranks(const StepPlan& plan, const PlanOp& op, Queue& queue);
  void issue_all_gather(const StepPlan& plan, const PlanOp& op, Queue& queue);
  void issue_reduce_scatter(const StepPlan& plan, const PlanOp& op, Queue& queue);
  void issue_narrow_grad(const StepPlan& plan, const PlanOp& op, Queue& queue);
  void issue_exchange_grad(const StepPlan& plan, const PlanOp& op, Queue& queue);
  void issue_sum_grad(const StepPlan& plan, const PlanOp& op, Queue& queue);
  void issue_gather_norms(const StepPlan& plan, Queue& queue);
  void copy(const StepPlan& plan, const PlanOp& op, Queue& queue);
  void upload_param(const StepPlan& plan, const PlanOp& op, Queue& queue);
  std::byte* address(const PlanBuffer& buffer) const;
  // This rank's part of a FlatParam's gradient or compute copy on the device; what is no array of
  // all parts is that of this rank.
  std::byte* own_row(const PlanBuffer& buffer) const;
  std::byte* norm_row(const StepPlan& plan) const;
  std::byte* device_scalars(const StepPlan& plan) const;
  Queue& queue_of(PlanLaneKind lane);
  SwapLane& swap_lane(PlanLaneKind lane) const {
    return lane == PlanLaneKind::kSwapIn ? *swap_in_lane_ : *swap_out_lane_;
  }
  void drain_swaps();
  void order_after_previous_walk();
  const std::string& name_of(int param) const {
    return input_.layout.flat_params[static_cast<size_t>(param)].name;
  }

  Backend& backend_;
  const PlanInput& input_;
  std::span<const std::unique_ptr<Block>> blocks_;
  ExecutorMemory memory_;
  BatchLimits limits_;
  Communicator& ranks_;
  std::vector<std::vector<DecayRun>> decay_runs_;  // per FlatParam: of this rank's part
  std::unordered_map<const StepPlan*, std::unique_ptr<PlanState>> states_;
  std::array<std::unique_ptr<Event>, 4> ends_;
  std::unique_ptr<SwapLane> swap_in_lane_;
  std::unique_ptr<SwapLane> swap_out_lane_;
  uint64_t uploaded_bytes_ = 0;
  uint64_t offloaded_bytes_ = 0;
};

}  // namespace orlop

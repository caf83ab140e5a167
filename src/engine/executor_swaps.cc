#include "base/check.h"
#include "engine/executor.h"

namespace orlop {

// `events`: of the operations before it, by operation.
SwapLane::Swap Executor::make_swap(const StepPlan& plan, const PlanOp& op,
                                   const std::vector<std::unique_ptr<Event>>& events) const {
  SwapLane::Swap swap;
  if (op.lane == PlanLaneKind::kSwapOut) swap.op = nvme::IoOp::kWrite;
  if (op.kind == OpKind::kSwapInParam) {
    swap.what = fmt::format("weights of {}", name_of(op.param));
    swap.param = op.param;
    swap.pieces = memory_.swap->copy_pieces(op.param, address(plan.buffer(op.uses.front())));
  } else {
    swap.what =
        fmt::format("block input of {}, micro-batch {}",
                    input_.layout.blocks[static_cast<size_t>(op.block)].name, op.micro_batch);
    const PlanBuffer& on_host = plan.buffer(*find_use(plan, op, BufferKind::kInput, Tier::kHost));
    const PlanBuffer& on_drive = plan.buffer(*find_use(plan, op, BufferKind::kInput, Tier::kNvme));
    swap.pieces = {memory_.swap->input_piece(on_drive, address(on_host))};
  }
  swap.after_update_before = op.after_update;
  for (const int wait : op.waits) {
    const PlanOp& earlier = plan.ops[static_cast<size_t>(wait)];
    Event* event = events[static_cast<size_t>(wait)].get();
    if (event != nullptr) {
      swap.after.push_back(event);
    } else if (earlier.lane == PlanLaneKind::kSwapIn || earlier.lane == PlanLaneKind::kSwapOut) {
      swap.after_other = wait;
    } else {
      ORLOP_INVARIANT(earlier.lane == PlanLaneKind::kOptimizer);
      swap.after_update = earlier.param;
    }
  }
  return swap;
}

void Executor::issue_swap(const StepPlan& plan, const PlanOp& op, const SwapLane::Swap& swap,
                          SwapLane::Turn turn, std::vector<uint32_t>& tickets) {
  if (swap.after_other >= 0) {
    const auto other = static_cast<size_t>(swap.after_other);
    turn.other = &swap_lane(plan.ops[other].lane);
    turn.other_ticket = tickets[other];
  }
  tickets[static_cast<size_t>(&op - plan.ops.data())] = swap_lane(op.lane).issue(swap, turn);
}

// Nothing moves any more when the first error is thrown. What goes out fails before what has to
// wait for it.
void Executor::drain_swaps() {
  if (swap_in_lane_ == nullptr) return;
  swap_out_lane_->wait_ended();
  swap_in_lane_->wait_ended();
  swap_out_lane_->rethrow();
  swap_in_lane_->rethrow();
}

}  // namespace orlop

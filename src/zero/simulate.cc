#include "zero/simulate.h"

#include <algorithm>

namespace orlop {
namespace {

// Per FlatParam: its compute copy comes up from a drive.
std::vector<bool> copies_on_nvme(const PlanInput& input, const StepPlan& plan) {
  std::vector<bool> found(input.layout.flat_params.size(), false);
  for (const PlanOp& op : plan.ops) {
    if (op.kind == OpKind::kSwapInParam) found[static_cast<size_t>(op.param)] = true;
  }
  return found;
}

size_t largest_use(const StepPlan& plan, const PlanOp& op, Tier tier) {
  size_t bytes = 0;
  for (const BufferUse& use : op.uses) {
    if (plan.buffer(use).tier == tier) bytes = std::max(bytes, plan.buffer(use).bytes);
  }
  return bytes;
}

using Lanes = std::array<double, kPlanLanes>;  // when each is free

constexpr size_t lane_index(PlanLaneKind lane) { return static_cast<size_t>(lane); }

// What one step leaves to the next: when each FlatParam's update is over, and the host's lanes that
// run it.
struct UpdateState {
  std::vector<double> gates;
  Lanes lanes{};
};

// One pass over the plan that starts at `start`; returns when the step's work on the device was
// over.
double walk(const PlanInput& input, const StepPlan& plan, const HardwareProfile& profile,
            double start, UpdateState& update, Simulation& result) {
  Lanes lanes;
  lanes.fill(start);
  std::vector<double> end(plan.ops.size(), 0);
  std::vector<double> new_gates = update.gates;
  const std::vector<bool> on_nvme = copies_on_nvme(input, plan);
  for (size_t i = 0; i < plan.ops.size(); ++i) {
    const PlanOp& op = plan.ops[i];
    const size_t lane = lane_index(op.lane);
    const bool updates = is_host_update(op.kind);
    double& lane_free = updates ? update.lanes[lane] : lanes[lane];
    double ready = lane_free;
    for (const int wait : op.waits) {
      const double over = end[static_cast<size_t>(wait)];
      if (op.lane == PlanLaneKind::kCompute && over > ready) {
        const size_t other = lane_index(plan.ops[static_cast<size_t>(wait)].lane);
        result.stall_seconds[other] += over - ready;
      }
      ready = std::max(ready, over);
    }
    if (op.after_update >= 0) {
      ready = std::max(ready, update.gates[static_cast<size_t>(op.after_update)]);
    }
    const double seconds = op_seconds(input, plan, op, profile);
    result.busy_seconds[lane] += seconds;
    end[i] = ready + seconds;
    lane_free = end[i];
    if (op.kind == OpKind::kHostAdam) result.optimizer_seconds += seconds;
    if (updates && op.kind != OpKind::kSwapInStates) {
      // A compute copy on the drives must be back there; one in memory is there with the update.
      const size_t param = static_cast<size_t>(op.param);
      if (op.kind == OpKind::kHostAdam || on_nvme[param]) new_gates[param] = end[i];
    }
  }
  update.gates = new_gates;
  return *std::max_element(lanes.begin(), lanes.end());
}

}  // namespace

double op_seconds(const PlanInput& input, const StepPlan& plan, const PlanOp& op,
                  const HardwareProfile& profile) {
  const double launch = profile.launch_seconds;
  const auto seconds = [&](size_t bytes, double rate) {
    return launch + static_cast<double>(bytes) / rate;
  };
  switch (op.kind) {
    case OpKind::kUploadBatch:
    case OpKind::kUploadParam:
    case OpKind::kUploadInput:
    case OpKind::kUnparkGrad:
      return seconds(largest_use(plan, op, Tier::kDevice), profile.upload_bytes_per_s);
    case OpKind::kOffloadInput:
    case OpKind::kParkGrad:
    case OpKind::kOffloadGrad:
    case OpKind::kOffloadLoss:
    case OpKind::kOffloadScalars:
      return seconds(largest_use(plan, op, Tier::kHost), profile.offload_bytes_per_s);
    case OpKind::kForward:
      return launch +
             input.forward_flops[static_cast<size_t>(op.block)] / profile.matmul_flop_per_s;
    case OpKind::kBackward: {
      // Two matmuls for each of the forward's, and the forward itself: recomputed, or the head's
      // first.
      return launch +
             3 * input.forward_flops[static_cast<size_t>(op.block)] / profile.matmul_flop_per_s;
    }
    case OpKind::kZeroGrad:
      return seconds(input.grad_bytes(op.param), profile.device_bytes_per_s);
    case OpKind::kRoundGrad:
      return seconds(input.grad_bytes(op.param) + 2 * input.rounded_grad_bytes(op.param),
                     profile.device_bytes_per_s);
    case OpKind::kFinishNorm:
      return launch;
    case OpKind::kDeviceAdam:
      return seconds(2 * input.state_bytes(op.param) + input.rounded_grad_bytes(op.param),
                     profile.device_bytes_per_s);
    case OpKind::kHostAdam: {
      const double share = op.chunk.index < 0 ? 1.0
                                              : static_cast<double>(op.chunk.numel) /
                                                    static_cast<double>(input.numel(op.param));
      const double bytes =
          static_cast<double>(2 * input.state_bytes(op.param) + input.rounded_grad_bytes(op.param));
      return launch + share * bytes / profile.host_bytes_per_s;
    }
    case OpKind::kSwapInParam:
    case OpKind::kSwapInStates:
      return seconds(op.swap_bytes, profile.nvme_read_bytes_per_s);
    case OpKind::kSwapOutStates:
      return seconds(op.swap_bytes, profile.nvme_write_bytes_per_s);
  }
  return 0;
}

Simulation simulate(const PlanInput& input, const StepPlan& plan, const HardwareProfile& profile) {
  UpdateState update{std::vector<double>(input.layout.flat_params.size(), 0), {}};
  Simulation warm_up;
  const double start = walk(input, plan, profile, 0, update, warm_up);
  Simulation result;
  const double over = walk(input, plan, profile, start, update, result);
  const double drives = result.busy_seconds[lane_index(PlanLaneKind::kSwapIn)] +
                        result.busy_seconds[lane_index(PlanLaneKind::kStatesIn)] +
                        result.busy_seconds[lane_index(PlanLaneKind::kStatesOut)];
  result.step_seconds = std::max(over - start, drives);
  return result;
}

}  // namespace orlop

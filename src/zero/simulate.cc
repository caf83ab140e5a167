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

// What steps leave behind for the next one: per FlatParam, when its update was over and when a save
// has read it; and when the host's lanes that run updates are free.
struct Times {
  std::vector<double> gates;
  std::vector<double> saved;
  Lanes update_lanes{};
};

// One pass over the plan that starts at `start`. Replaces times by this step's; returns when the
// step's work on the device was over.
double walk(const PlanInput& input, const StepPlan& plan, const HardwareProfile& profile,
            double start, Times& times, Simulation& result) {
  Lanes lanes;
  lanes.fill(start);
  std::vector<double> end(plan.ops.size(), 0);
  std::vector<double> new_gates = times.gates;
  const std::vector<bool> on_nvme = copies_on_nvme(input, plan);
  for (size_t i = 0; i < plan.ops.size(); ++i) {
    const PlanOp& op = plan.ops[i];
    const size_t lane = lane_index(op.lane);
    const bool updates = is_host_update(op.kind);
    double& lane_free = updates ? times.update_lanes[lane] : lanes[lane];
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
      ready = std::max(ready, times.gates[static_cast<size_t>(op.after_update)]);
    }
    if (op.kind == OpKind::kHostAdam || op.kind == OpKind::kDeviceAdam)
      ready = std::max(ready, times.saved[static_cast<size_t>(op.param)]);
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
  times.gates = new_gates;
  return *std::max_element(lanes.begin(), lanes.end());
}

// Seconds of attention for each that a large matmul of as many operations takes: cuDNN's on an
// H100, sequences of 2048, 24 heads of 128, 16,384 tokens: forward 0.43 ms, deterministic
// backward 1.77 ms. Backward does 2.5 times the forward's operations.
constexpr double kAttentionForward = 1.5;
constexpr double kAttentionBackward = 2.5 * 2.4;

double forward_seconds(const PlanInput& input, int block, const HardwareProfile& profile) {
  const auto b = static_cast<size_t>(block);
  const double flops = input.forward_flops[b] + (kAttentionForward - 1) * input.attention_flops[b];
  return flops / profile.matmul_flop_per_s + input.forward_bytes[b] / profile.device_bytes_per_s;
}

// The forward itself, recomputed or the head's first; then two matmuls, and about twice the bytes,
// for each of the forward's.
double backward_seconds(const PlanInput& input, int block, const HardwareProfile& profile) {
  const auto b = static_cast<size_t>(block);
  const double flops = 2 * (input.forward_flops[b] - input.attention_flops[b]) +
                       kAttentionBackward * input.attention_flops[b];
  return forward_seconds(input, block, profile) + flops / profile.matmul_flop_per_s +
         2 * input.forward_bytes[b] / profile.device_bytes_per_s;
}

}  // namespace

double op_seconds(const PlanInput& input, const StepPlan& plan, const PlanOp& op,
                  const HardwareProfile& profile) {
  const double launch = profile.launch_seconds;
  const auto seconds = [&](size_t bytes, double rate) {
    return launch + static_cast<double>(bytes) / rate;
  };
  switch (op.kind) {
    case OpKind::kUploadParam:
      return seconds(input.shard_param_bytes(op.param), profile.upload_bytes_per_s);
    case OpKind::kAllGather:
    case OpKind::kReduceScatter:
    case OpKind::kExchangeGrad:
    case OpKind::kGatherNorms:
      return seconds(received_bytes(input, op), profile.collective_bytes_per_s);
    case OpKind::kNarrowGrad:
      return seconds(input.grad_bytes(op.param) + input.wire_bytes(op.param),
                     profile.device_bytes_per_s);
    case OpKind::kSumGrad:
      return seconds(input.wire_bytes(op.param) +
                         static_cast<size_t>(input.shard_numel(op.param)) * sizeof(float),
                     profile.device_bytes_per_s);
    case OpKind::kUploadBatch:
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
      return launch + forward_seconds(input, op.block, profile);
    case OpKind::kBackward:
      return launch + backward_seconds(input, op.block, profile);
    case OpKind::kZeroGrad:
      return seconds(input.grad_bytes(op.param), profile.device_bytes_per_s);
    case OpKind::kRoundGrad:
      return seconds(static_cast<size_t>(input.shard_numel(op.param)) * sizeof(float) +
                         2 * input.rounded_grad_bytes(op.param),
                     profile.device_bytes_per_s);
    case OpKind::kFinishNorm:
      return launch;
    case OpKind::kDeviceAdam:
      return seconds(2 * input.state_bytes(op.param) + input.rounded_grad_bytes(op.param),
                     profile.device_bytes_per_s);
    case OpKind::kHostAdam: {
      const double share = static_cast<double>(op.chunk.numel) /
                           static_cast<double>(std::max<int64_t>(1, input.shard_numel(op.param)));
      const double bytes =
          static_cast<double>(2 * input.state_bytes(op.param) + input.rounded_grad_bytes(op.param));
      return launch + share * bytes / profile.host_bytes_per_s;
    }
    case OpKind::kSwapInParam:
    case OpKind::kSwapInInput:
    case OpKind::kSwapInStates:
      return seconds(op.swap_bytes, profile.nvme_read_bytes_per_s);
    case OpKind::kSwapOutInput:
    case OpKind::kSwapOutStates:
      return seconds(op.swap_bytes, profile.nvme_write_bytes_per_s);
  }
  return 0;
}

Simulation simulate(const PlanInput& input, const StepPlan& plan, const HardwareProfile& profile) {
  const size_t params = input.layout.flat_params.size();
  Times times{std::vector<double>(params), std::vector<double>(params)};
  Simulation warm_up;
  const double start = walk(input, plan, profile, 0, times, warm_up);
  Simulation result;
  const double over = walk(input, plan, profile, start, times, result);
  const double drives = result.busy_seconds[lane_index(PlanLaneKind::kSwapIn)] +
                        result.busy_seconds[lane_index(PlanLaneKind::kSwapOut)] +
                        result.busy_seconds[lane_index(PlanLaneKind::kStatesIn)] +
                        result.busy_seconds[lane_index(PlanLaneKind::kStatesOut)];
  result.step_seconds = std::max(over - start, drives);
  return result;
}

SaveSimulation simulate_save(const PlanInput& input, const StepPlan& plan,
                             const HardwareProfile& profile) {
  const size_t params = input.layout.flat_params.size();
  Times times{std::vector<double>(params), std::vector<double>(params)};
  Simulation ignored;
  double start = 0;
  for (int step = 0; step < 2; ++step) start = walk(input, plan, profile, start, times, ignored);
  Times undisturbed = times;

  SaveSimulation save;
  const std::vector<int> order = update_order(plan);
  const size_t copied = snapshot_count(input, order);
  std::vector<size_t> swapped(params, 0);  // bytes that a save has to bring from drives
  for (const PlanOp& op : plan.ops) {
    if (op.kind == OpKind::kSwapInStates) swapped[static_cast<size_t>(op.param)] += op.swap_bytes;
  }
  double now = start;
  for (size_t i = 0; i < order.size(); ++i) {
    const auto param = static_cast<size_t>(order[i]);
    const size_t bytes = input.saved_bytes(order[i]);
    now = std::max(now, times.gates[param]);
    now += static_cast<double>(swapped[param]) / profile.nvme_read_bytes_per_s;
    if (i < copied) {
      now += 2 * static_cast<double>(input.state_bytes(order[i])) / profile.host_bytes_per_s;
    } else {
      now += static_cast<double>(bytes) / profile.nvme_write_bytes_per_s;
    }
    times.saved[param] = now;
    save.bytes += bytes;
  }
  save.seconds = static_cast<double>(save.bytes) / profile.nvme_write_bytes_per_s;
  double with_save = start;
  double without = start;
  // The second step waits for the updates that the save delayed.
  for (int step = 0; step < 2; ++step) {
    with_save = walk(input, plan, profile, with_save, times, ignored);
    without = walk(input, plan, profile, without, undisturbed, ignored);
  }
  save.stall_seconds = with_save - without;
  return save;
}

}  // namespace orlop

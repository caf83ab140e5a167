#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "base/bytes.h"
#include "base/check.h"
#include "zero/pinned_ranges.h"
#include "zero/placement_plan.h"
#include "zero/simulate.h"

namespace orlop {
namespace {

const char* purpose(const PlanInput& input, const PlanBuffer& buffer) {
  const bool host = buffer.tier == Tier::kHost;
  switch (buffer.kind) {
    case BufferKind::kParam:
      if (!buffer.persistent) return "weights, in flight";
      return host ? "weights, their other states on drives" : "weights, resident";
    case BufferKind::kGrad:
      return host ? "gradients, parked between waves" : "gradients, fp32";
    case BufferKind::kRoundedGrad:
      if (!host) return "gradients, rounded";
      return buffer.persistent ? "gradients, waiting for the norm" : "gradients, being read";
    case BufferKind::kWire:
      return "gradients, between ranks";
    case BufferKind::kInput:
      return "block inputs";
    case BufferKind::kActivationGrad:
      return "activation gradients";
    case BufferKind::kWorkspace:
    case BufferKind::kNormScratch:
      return "block workspace";
    case BufferKind::kState:
      return input.evaluates_only ? "weights" : "masters and moments";
    case BufferKind::kSwapSlot:
      return "states, between drive and update";
    case BufferKind::kSnapshot:
      return "snapshot for saves";
    case BufferKind::kBatch:
    case BufferKind::kLoss:
    case BufferKind::kRope:
    case BufferKind::kNormSums:
    case BufferKind::kScalars:
      return "batches, tables, scalars";
  }
  return "?";
}

// Bytes per purpose at the moment when most of a tier is in use; the rest of its arena is gaps.
std::vector<PlanLine> tier_lines(const PlanInput& input, const StepPlan& plan, Tier tier) {
  const size_t moments = plan.ops.size();
  std::vector<size_t> live(moments + 1, 0);
  for (const PlanBuffer& buffer : plan.buffers) {
    if (buffer.tier != tier || buffer.first_op < 0) continue;
    for (int op = buffer.first_op; op <= buffer.last_op; ++op)
      live[static_cast<size_t>(op)] += buffer.bytes;
  }
  const int peak = static_cast<int>(std::max_element(live.begin(), live.end()) - live.begin());
  std::map<std::string, size_t> bytes;
  size_t sum = 0;
  for (const PlanBuffer& buffer : plan.buffers) {
    if (buffer.tier != tier || buffer.first_op > peak || buffer.last_op < peak) continue;
    bytes[purpose(input, buffer)] += buffer.bytes;
    sum += buffer.bytes;
  }
  if (plan.arena_bytes(tier) > sum) bytes["gaps"] = plan.arena_bytes(tier) - sum;
  std::vector<PlanLine> lines;
  for (const auto& [name, amount] : bytes) lines.push_back({tier, name, amount});
  std::sort(lines.begin(), lines.end(),
            [](const PlanLine& a, const PlanLine& b) { return a.bytes > b.bytes; });
  return lines;
}

// How many FlatParams, and which share of all elements, are where.
void count_homes(const PlanInput& input, const PlacementPlan& placement, PlanReport& report) {
  report.blocks = static_cast<int>(placement.params.size());
  double states = 0;
  double copies = 0;
  double all = 0;
  for (int param = 0; param < report.blocks; ++param) {
    const ParamPlacement& home = placement.params[static_cast<size_t>(param)];
    const int64_t numel = input.shard_numel(param);
    report.state_bytes += input.state_bytes(param);
    if (home.optimizer == Tier::kDevice) ++report.device_optimizer_blocks;
    if (home.resident) ++report.resident_blocks;
    all += static_cast<double>(numel);
    if (home.optimizer != Tier::kNvme) continue;
    ++report.nvme_optimizer_blocks;
    states += static_cast<double>(numel - placement.host_states_numel(param));
    if (home.copy == Tier::kNvme) ++report.nvme_param_blocks;
    copies += static_cast<double>(numel - placement.host_copy_numel(param, numel));
  }
  report.nvme_optimizer_share = all > 0 ? states / all : 0;
  report.nvme_param_share = all > 0 ? copies / all : 0;
}

}  // namespace

PlanReport make_report(const PlanInput& input, const PlannedStep& planned, const Budgets& budgets,
                       const HardwareProfile& profile) {
  PlanReport report;
  const StepPlan& plan = planned.main();
  report.evaluates_only = input.evaluates_only;
  report.parameters = input.layout.trainable_numel();
  report.ranks = input.world_size;
  report.gradient_wire = input.gradient_wire;
  report.tokens_per_step = input.shape.rows * input.micro_batches * input.world_size;
  report.device_peak_bytes =
      input.device_fixed_bytes + std::max(plan.device_bytes, planned.eval.device_bytes);
  report.device_fixed_bytes = input.device_fixed_bytes;
  report.device_budget_bytes = budgets.device_bytes;
  report.host_bytes = std::max(plan.host_bytes, planned.eval.host_bytes);
  report.host_budget_bytes = budgets.host_bytes;
  report.host_pinned_bytes = pinned_bytes(input, planned);
  report.nvme_bytes = plan.nvme_bytes;
  report.nvme_budget_bytes = budgets.nvme_bytes;
  for (const PlanOp& op : plan.ops) {
    const bool writes = op.kind == OpKind::kSwapOutStates || op.kind == OpKind::kSwapOutInput;
    (writes ? report.nvme_written_bytes : report.nvme_read_bytes) += op.swap_bytes;
  }
  count_homes(input, planned.placement, report);
  report.lines = tier_lines(input, plan, Tier::kDevice);
  if (input.device_fixed_bytes > 0) {
    report.lines.push_back(
        {Tier::kDevice, "device context and matmul workspace", input.device_fixed_bytes});
  }
  const std::vector<PlanLine> host = tier_lines(input, plan, Tier::kHost);
  report.lines.insert(report.lines.end(), host.begin(), host.end());
  for (const auto& [what, bytes] :
       {std::pair("masters and moments", plan.nvme_bytes - plan.nvme_input_bytes),
        std::pair("block inputs", plan.nvme_input_bytes)}) {
    if (bytes > 0) report.lines.push_back({Tier::kNvme, what, bytes});
  }
  report.prefetch_depth = planned.placement.prefetch_depth;
  report.waves = (input.micro_batches + planned.placement.wave - 1) / planned.placement.wave;
  report.activations = planned.placement.activations;
  report.updates_in_backward = !input.updates_wait_for_norm;
  const Simulation time = simulate(input, plan, profile);
  report.step_seconds = time.step_seconds;
  report.compute_seconds = time.busy_seconds[static_cast<size_t>(PlanLaneKind::kCompute)];
  report.optimizer_seconds = time.optimizer_seconds;
  for (size_t lane = 0; lane < static_cast<size_t>(kPlanLanes); ++lane) {
    const auto kind = static_cast<PlanLaneKind>(lane);
    const bool of_drives = kind == PlanLaneKind::kSwapIn || kind == PlanLaneKind::kSwapOut ||
                           kind == PlanLaneKind::kStatesIn || kind == PlanLaneKind::kStatesOut;
    if (of_drives && plan.nvme_bytes == 0) continue;
    report.lanes.push_back({lane_name(kind), time.busy_seconds[lane], time.stall_seconds[lane]});
  }
  for (const double flops : input.forward_flops)
    report.forward_flops += flops * input.micro_batches;
  if (profile.is_measured) report.matmul_flop_per_s = profile.matmul_flop_per_s;
  const SaveSimulation save = simulate_save(input, plan, profile);
  report.save_bytes = save.bytes;
  report.save_seconds = save.seconds;
  report.save_stall_seconds = save.stall_seconds;
  report.time_is_measured = profile.is_measured;
  report.profile = profile.source;
  return report;
}

namespace {

std::string rank_text(const PlanReport& report) {
  const bool narrow = !report.evaluates_only && report.gradient_wire != DType::kF32;
  return fmt::format("; each of {} ranks{}:", report.ranks,
                     narrow ? fmt::format(", which send each other gradients in {}",
                                          dtype_name(report.gradient_wire))
                            : "");
}

}  // namespace

std::string PlanReport::to_text() const {
  std::string text = fmt::format("{} on {}: {:.1f} M parameters, {} tokens per step{}\n", model,
                                 device, static_cast<double>(parameters) / 1e6, tokens_per_step,
                                 ranks == 1 ? "" : rank_text(*this));
  const double share = state_bytes > 0 ? 100.0 * static_cast<double>(device_peak_bytes) /
                                             static_cast<double>(state_bytes)
                                       : 0.0;
  text += fmt::format("  device {} of {} ({:.1f} % of the {} of {}), host {} of {}{}\n",
                      format_bytes(device_peak_bytes), format_bytes(device_budget_bytes), share,
                      format_bytes(state_bytes), evaluates_only ? "weights" : "optimizer states",
                      format_bytes(host_bytes), format_bytes(host_budget_bytes),
                      host_pinned_bytes == 0
                          ? ""
                          : fmt::format(", {} of it pinned", format_bytes(host_pinned_bytes)));
  if (evaluates_only) {
    text +=
        fmt::format("  {} of {} parameter groups resident, {} on the device alone; prefetch {}\n",
                    resident_blocks, blocks, device_optimizer_blocks, prefetch_depth);
  } else {
    text += fmt::format(
        "  {} of {} parameter groups resident, {} updated on the device{}; prefetch {}, {} wave{}, "
        "block inputs on {}\n",
        resident_blocks, blocks, device_optimizer_blocks,
        updates_in_backward ? ", updates inside backward" : "", prefetch_depth, waves,
        waves == 1 ? "" : "s",
        activations == Tier::kNvme ? "drives" : fmt::format("the {}", tier_name(activations)));
  }
  if (nvme_bytes > 0) {
    text += fmt::format(
        "  nvme {} of {}: optimizer states of {} parameter groups ({:.1f} % of all), weights of {} "
        "({:.1f} %); {} read and {} written per step, {} for a checkpoint\n",
        format_bytes(nvme_bytes), format_bytes(nvme_budget_bytes), nvme_optimizer_blocks,
        100 * nvme_optimizer_share, nvme_param_blocks, 100 * nvme_param_share,
        format_bytes(nvme_read_bytes), format_bytes(nvme_written_bytes), format_bytes(save_bytes));
  }
  for (const PlanLine& line : lines) {
    text += fmt::format("  {:7} {:36} {:>12}\n", tier_name(line.tier), line.purpose,
                        format_bytes(line.bytes));
  }
  text += fmt::format(
      "  {} {:.3f} s predicted: {:.0f} tokens/s{}\n  predicted from {}\n",
      evaluates_only ? "evaluation" : "step", step_seconds,
      step_seconds > 0 ? static_cast<double>(tokens_per_step) / step_seconds : 0.0,
      evaluates_only ? "" : fmt::format("; host update {:.3f} s", optimizer_seconds),
      time_is_measured ? profile
                       : "typical figures; `orlop doctor --measure` finds this machine's");
  for (const PlanLane& lane : lanes) {
    text += fmt::format("  {:9} busy {:8.3f} s", lane.queue, lane.busy_seconds);
    if (lane.queue != "compute")
      text += fmt::format(", compute waits {:.3f} s for it", lane.stall_seconds);
    text += '\n';
  }
  if (evaluates_only) return text;
  text += fmt::format(
      "  save      {} in {:.1f} s in the background, of which steps are delayed by {:.1f} s\n",
      format_bytes(save_bytes), save_seconds, save_stall_seconds);
  return text;
}

std::string PlanReport::to_json() const {
  nlohmann::json document = {{"model", model},
                             {"device", device},
                             {"evaluates_only", evaluates_only},
                             {"parameters", parameters},
                             {"ranks", ranks},
                             {"gradient_wire", dtype_name(gradient_wire)},
                             {"tokens_per_step", tokens_per_step},
                             {"device_peak_bytes", device_peak_bytes},
                             {"device_fixed_bytes", device_fixed_bytes},
                             {"device_budget_bytes", device_budget_bytes},
                             {"host_bytes", host_bytes},
                             {"host_budget_bytes", host_budget_bytes},
                             {"host_pinned_bytes", host_pinned_bytes},
                             {"nvme_bytes", nvme_bytes},
                             {"nvme_budget_bytes", nvme_budget_bytes},
                             {"nvme_read_bytes", nvme_read_bytes},
                             {"nvme_written_bytes", nvme_written_bytes},
                             {"nvme_optimizer_blocks", nvme_optimizer_blocks},
                             {"nvme_param_blocks", nvme_param_blocks},
                             {"nvme_optimizer_share", nvme_optimizer_share},
                             {"nvme_param_share", nvme_param_share},
                             {"state_bytes", state_bytes},
                             {"blocks", blocks},
                             {"resident_blocks", resident_blocks},
                             {"device_optimizer_blocks", device_optimizer_blocks},
                             {"prefetch_depth", prefetch_depth},
                             {"waves", waves},
                             {"activations", tier_name(activations)},
                             {"updates_in_backward", updates_in_backward},
                             {"step_seconds", step_seconds},
                             {"compute_seconds", compute_seconds},
                             {"optimizer_seconds", optimizer_seconds},
                             {"forward_flops", forward_flops},
                             {"save_bytes", save_bytes},
                             {"save_seconds", save_seconds},
                             {"save_stall_seconds", save_stall_seconds},
                             {"time_is_measured", time_is_measured},
                             {"profile", profile}};
  for (const PlanLine& line : lines) {
    document["lines"].push_back(
        {{"tier", tier_name(line.tier)}, {"purpose", line.purpose}, {"bytes", line.bytes}});
  }
  for (const PlanLane& lane : lanes) {
    document["lanes"].push_back({{"queue", lane.queue},
                                 {"busy_seconds", lane.busy_seconds},
                                 {"stall_seconds", lane.stall_seconds}});
  }
  return document.dump(2);
}

}  // namespace orlop

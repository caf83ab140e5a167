#include "zero/step_plan.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/bytes.h"
#include "base/check.h"
#include "zero/partition.h"

namespace orlop {

size_t PlanInput::activation_bytes() const {
  return static_cast<size_t>(shape.rows * hidden) * dtype_bytes(compute_dtype);
}

size_t PlanInput::drive_activation_bytes() const {
  return align_up(activation_bytes(), kDriveAlignment);
}

// tokens, labels, positions, cu_seqlens and twice (sorted rows, run begins, run indices).
size_t PlanInput::batch_bytes() const {
  return static_cast<size_t>(10 * (shape.rows + 2)) * sizeof(int32_t) + 10 * kDeviceAlignment;
}

int64_t PlanInput::shard_numel(int param) const {
  const int64_t numel = layout.flat_params[static_cast<size_t>(param)].numel;
  return world_size == 1 ? numel : shard_range(numel, 0, world_size).padded_numel;
}

size_t PlanInput::param_bytes(int param) const {
  return static_cast<size_t>(world_size) * shard_param_bytes(param);
}

size_t PlanInput::grad_bytes(int param) const {
  return static_cast<size_t>(world_size * shard_numel(param)) * sizeof(float);
}

size_t PlanInput::shard_param_bytes(int param) const {
  return static_cast<size_t>(shard_numel(param)) * dtype_bytes(compute_dtype);
}

size_t PlanInput::wire_bytes(int param) const {
  return static_cast<size_t>(shard_numel(param) * world_size) * dtype_bytes(gradient_wire);
}

size_t PlanInput::rounded_grad_bytes(int param) const { return shard_param_bytes(param); }

size_t PlanInput::state_bytes_per_element() const {
  if (evaluates_only) return dtype_bytes(compute_dtype);
  const size_t master = compute_dtype == DType::kF16 ? 6 : 4;  // fp16: fp32 master and fp16 copy
  return master + 2 * dtype_bytes(moment_dtype);
}

size_t PlanInput::state_bytes(int param) const {
  return static_cast<size_t>(shard_numel(param)) * state_bytes_per_element();
}

bool PlacementPlan::uses_nvme() const {
  return activations == Tier::kNvme ||
         std::any_of(params.begin(), params.end(),
                     [](const ParamPlacement& home) { return home.optimizer == Tier::kNvme; });
}

int PlacementPlan::chunk_count(int64_t numel) const {
  return static_cast<int>(std::max<int64_t>(1, ceil_div(numel, chunk_numel)));
}

std::vector<StateChunk> PlacementPlan::chunks(int64_t numel) const {
  std::vector<StateChunk> chunks;
  for (int index = 0; index < chunk_count(numel); ++index) {
    const int64_t begin = index * chunk_numel;
    chunks.push_back({index, begin, std::min(chunk_numel, numel - begin)});
  }
  return chunks;
}

bool PlacementPlan::states_are_on_nvme(int param, const StateChunk& chunk) const {
  const ParamPlacement& home = params[static_cast<size_t>(param)];
  return home.optimizer == Tier::kNvme && chunk.index >= home.host_chunks;
}

bool PlacementPlan::copy_is_on_nvme(int param, const StateChunk& chunk) const {
  const ParamPlacement& home = params[static_cast<size_t>(param)];
  return home.copy == Tier::kNvme && chunk.index >= home.host_copies;
}

int64_t PlacementPlan::host_states_numel(int param) const {
  return params[static_cast<size_t>(param)].host_chunks * chunk_numel;
}

int64_t PlacementPlan::host_copy_numel(int param, int64_t numel) const {
  const ParamPlacement& home = params[static_cast<size_t>(param)];
  return home.copy == Tier::kNvme ? home.host_copies * chunk_numel : numel;
}

size_t chunk_copy_bytes(const PlanInput& input, const StateChunk& chunk) {
  return align_up(static_cast<size_t>(chunk.numel) * dtype_bytes(input.compute_dtype),
                  kDriveAlignment);
}

size_t chunk_rest_bytes(const PlanInput& input, const StateChunk& chunk) {
  return align_up(static_cast<size_t>(chunk.numel) *
                      (input.state_bytes_per_element() - dtype_bytes(input.compute_dtype)),
                  kDriveAlignment);
}

bool is_host_update(OpKind kind) {
  return kind == OpKind::kHostAdam || kind == OpKind::kSwapInStates ||
         kind == OpKind::kSwapOutStates;
}

size_t PlanInput::saved_bytes(int param) const {
  return static_cast<size_t>(shard_numel(param)) * (sizeof(float) + 2 * dtype_bytes(moment_dtype));
}

std::vector<int> update_order(const StepPlan& plan) {
  std::vector<int> order;
  for (const PlanOp& op : plan.ops) {
    const bool updates = op.kind == OpKind::kHostAdam || op.kind == OpKind::kDeviceAdam;
    // Chunks of one FlatParam follow each other.
    if (updates && (order.empty() || order.back() != op.param)) order.push_back(op.param);
  }
  return order;
}

size_t received_bytes(const PlanInput& input, const PlanOp& op) {
  const size_t others = static_cast<size_t>(input.world_size - 1);
  switch (op.kind) {
    case OpKind::kAllGather:
      return others * input.shard_param_bytes(op.param);
    case OpKind::kReduceScatter:
    case OpKind::kExchangeGrad:
      return others * static_cast<size_t>(input.shard_numel(op.param)) *
             dtype_bytes(input.gradient_wire);
    case OpKind::kGatherNorms:
      return others * norm_row_bytes(input.layout.flat_params.size());
    default:
      return 0;
  }
}

size_t snapshot_count(const PlanInput& input, const std::vector<int>& order) {
  size_t bytes = 0;
  size_t count = 0;
  while (count < order.size() && bytes + input.state_bytes(order[count]) <= input.snapshot_bytes) {
    bytes += input.state_bytes(order[count++]);
  }
  return count;
}

const BufferUse* find_use(const StepPlan& plan, const PlanOp& op, BufferKind kind, Tier tier,
                          int param) {
  for (const BufferUse& use : op.uses) {
    const PlanBuffer& buffer = plan.buffer(use);
    if (buffer.kind == kind && buffer.tier == tier && (param < 0 || buffer.param == param))
      return &use;
  }
  return nullptr;
}

const char* op_name(OpKind kind) {
  switch (kind) {
    case OpKind::kUploadBatch:
      return "upload_batch";
    case OpKind::kUploadParam:
      return "upload_param";
    case OpKind::kAllGather:
      return "all_gather";
    case OpKind::kForward:
      return "forward";
    case OpKind::kBackward:
      return "backward";
    case OpKind::kOffloadInput:
      return "offload_input";
    case OpKind::kUploadInput:
      return "upload_input";
    case OpKind::kSwapOutInput:
      return "swap_out_input";
    case OpKind::kSwapInInput:
      return "swap_in_input";
    case OpKind::kZeroGrad:
      return "zero_grad";
    case OpKind::kParkGrad:
      return "park_grad";
    case OpKind::kUnparkGrad:
      return "unpark_grad";
    case OpKind::kReduceScatter:
      return "reduce_scatter";
    case OpKind::kNarrowGrad:
      return "narrow_grad";
    case OpKind::kExchangeGrad:
      return "exchange_grad";
    case OpKind::kSumGrad:
      return "sum_grad";
    case OpKind::kRoundGrad:
      return "round_grad";
    case OpKind::kOffloadGrad:
      return "offload_grad";
    case OpKind::kOffloadLoss:
      return "offload_loss";
    case OpKind::kGatherNorms:
      return "gather_norms";
    case OpKind::kFinishNorm:
      return "finish_norm";
    case OpKind::kOffloadScalars:
      return "offload_scalars";
    case OpKind::kDeviceAdam:
      return "device_adam";
    case OpKind::kHostAdam:
      return "host_adam";
    case OpKind::kSwapInParam:
      return "swap_in_param";
    case OpKind::kSwapInStates:
      return "swap_in_states";
    case OpKind::kSwapOutStates:
      return "swap_out_states";
  }
  return "?";
}

const char* lane_name(PlanLaneKind lane) {
  switch (lane) {
    case PlanLaneKind::kCompute:
      return "compute";
    case PlanLaneKind::kUpload:
      return "upload";
    case PlanLaneKind::kOffload:
      return "offload";
    case PlanLaneKind::kOptimizer:
      return "optimizer";
    case PlanLaneKind::kSwapIn:
      return "swap_in";
    case PlanLaneKind::kSwapOut:
      return "swap_out";
    case PlanLaneKind::kStatesIn:
      return "state_in";
    case PlanLaneKind::kStatesOut:
      return "state_out";
    case PlanLaneKind::kComm:
      return "comm";
  }
  return "?";
}

namespace {

const char* buffer_name(BufferKind kind) {
  switch (kind) {
    case BufferKind::kParam:
      return "param";
    case BufferKind::kGrad:
      return "grad";
    case BufferKind::kRoundedGrad:
      return "rounded_grad";
    case BufferKind::kWire:
      return "wire";
    case BufferKind::kNormScratch:
      return "norm_scratch";
    case BufferKind::kInput:
      return "input";
    case BufferKind::kActivationGrad:
      return "activation_grad";
    case BufferKind::kWorkspace:
      return "workspace";
    case BufferKind::kBatch:
      return "batch";
    case BufferKind::kLoss:
      return "loss";
    case BufferKind::kState:
      return "state";
    case BufferKind::kRope:
      return "rope";
    case BufferKind::kNormSums:
      return "norm_sums";
    case BufferKind::kSnapshot:
      return "snapshot";
    case BufferKind::kScalars:
      return "scalars";
    case BufferKind::kSwapSlot:
      return "swap_slot";
  }
  return "?";
}

}  // namespace

std::string StepPlan::to_text(const PlanInput& input) const {
  std::string text =
      fmt::format("device {} B, host {} B, {} operations\n", device_bytes, host_bytes, ops.size());
  if (nvme_bytes > 0) text += fmt::format("nvme {} B\n", nvme_bytes);
  for (size_t i = 0; i < ops.size(); ++i) {
    const PlanOp& op = ops[i];
    text += fmt::format("{:4} {:9} {}", i, lane_name(op.lane), op_name(op.kind));
    if (op.block >= 0) {
      text += fmt::format(" {}", input.layout.blocks[static_cast<size_t>(op.block)].name);
    }
    if (op.param >= 0) {
      text += fmt::format(" {}", input.layout.flat_params[static_cast<size_t>(op.param)].name);
    }
    if (op.micro_batch >= 0) text += fmt::format(" mb{}", op.micro_batch);
    const bool is_part = op.param >= 0 && op.chunk.numel < input.shard_numel(op.param);
    if (op.chunk.index >= 0 || (op.kind == OpKind::kHostAdam && is_part)) {
      text += fmt::format(" [{}, {})", op.chunk.begin, op.chunk.begin + op.chunk.numel);
    }
    for (const BufferUse& use : op.uses) {
      const PlanBuffer& b = buffer(use);
      text +=
          fmt::format(" {}{}:{}@{}+{}",
                      use.write ? "w:" : "r:", b.tier == Tier::kDevice ? "dev" : tier_name(b.tier),
                      buffer_name(b.kind), b.offset, b.bytes);
    }
    for (const int wait : op.waits) text += fmt::format(" <{}", wait);
    if (op.after_update >= 0) {
      text += fmt::format(" <update of {}",
                          input.layout.flat_params[static_cast<size_t>(op.after_update)].name);
    }
    text += '\n';
  }
  return text;
}

}  // namespace orlop

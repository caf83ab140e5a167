#include <algorithm>
#include <array>

#include "engine/executor.h"
#include "zero/partition.h"

// What single operations of a plan issue: copies, blocks, norms and updates on the device.
namespace orlop {

// A copy between the tiers: the operation's one host buffer and its one device buffer, and the
// StepScalars of an offloaded gradient.
void Executor::copy(const StepPlan& plan, const PlanOp& op, Queue& queue) {
  const PlanBuffer* host = nullptr;
  const PlanBuffer* device = nullptr;
  for (const BufferUse& use : op.uses) {
    const PlanBuffer& buffer = plan.buffer(use);
    if (buffer.kind == BufferKind::kScalars) continue;
    (buffer.tier == Tier::kHost ? host : device) = &buffer;
  }
  std::byte* on_device = op.kind == OpKind::kOffloadGrad ? own_row(*device) : address(*device);
  const size_t bytes =
      op.kind == OpKind::kUploadBatch ? input_.batch_bytes() : std::min(host->bytes, device->bytes);
  if (op.lane == PlanLaneKind::kUpload) {
    queue.upload(on_device, address(*host), bytes);
    uploaded_bytes_ += bytes;
  } else {
    queue.offload(address(*host), on_device, bytes);
    offloaded_bytes_ += bytes;
  }
  if (op.kind != OpKind::kOffloadGrad) return;
  if (const BufferUse* scalars = find_use(plan, op, BufferKind::kScalars, Tier::kDevice)) {
    const BufferUse* to = find_use(plan, op, BufferKind::kScalars, Tier::kHost);
    queue.offload(address(plan.buffer(*to)), address(plan.buffer(*scalars)), sizeof(StepScalars));
  }
}

// This rank's part of a compute copy, from one or two host buffers in the order of its elements. A
// state buffer, where the copy comes first, is read as far as that goes.
void Executor::upload_param(const StepPlan& plan, const PlanOp& op, Queue& queue) {
  std::byte* to = own_row(plan.buffer(op.uses.back()));
  size_t left = input_.shard_param_bytes(op.param);
  for (size_t part = 0; part + 1 < op.uses.size(); ++part) {
    const PlanBuffer& from = plan.buffer(op.uses[part]);
    const size_t bytes = std::min(left, from.bytes);
    queue.upload(to, address(from), bytes);
    uploaded_bytes_ += bytes;
    to += bytes;
    left -= bytes;
  }
}

void Executor::issue_block(const StepPlan& plan, const PlanOp& op, BatchView batch, Queue& queue) {
  const BlockLayout& layout = input_.layout.blocks[static_cast<size_t>(op.block)];
  std::array<const void*, 2> params{};
  std::array<float*, 2> grads{};
  const size_t count = layout.flat_params.size();
  const auto device = [&](BufferKind kind, int param = -1) -> std::byte* {
    const BufferUse* use = find_use(plan, op, kind, Tier::kDevice, param);
    return use == nullptr ? nullptr : address(plan.buffer(*use));
  };
  for (size_t i = 0; i < count; ++i) {
    const int param = layout.flat_params[i];
    params[i] = device(BufferKind::kParam, param);
    if (params[i] == nullptr) params[i] = device(BufferKind::kState, param);
    grads[i] = reinterpret_cast<float*>(device(BufferKind::kGrad, param));
  }
  batch.loss = reinterpret_cast<float*>(device(BufferKind::kLoss));
  const BlockCall call{.ops = backend_.ops(),
                       .queue = queue,
                       .batch = batch,
                       .params = {params.data(), count},
                       .grads = {grads.data(), op.kind == OpKind::kBackward ? count : 0},
                       .workspace = device(BufferKind::kWorkspace),
                       .rope = reinterpret_cast<const float*>(device(BufferKind::kRope))};
  std::byte* input = nullptr;
  std::byte* output = nullptr;
  for (const BufferUse& use : op.uses) {
    const PlanBuffer& buffer = plan.buffer(use);
    if (buffer.kind != BufferKind::kInput) continue;
    (buffer.block == op.block ? input : output) = address(buffer);
  }
  Block& block = *blocks_[static_cast<size_t>(op.block)];
  if (op.kind == OpKind::kForward) {
    block.forward(call, input, output);
  } else {
    block.backward(call, input, device(BufferKind::kActivationGrad));
  }
}

void Executor::issue_round_grad(const StepPlan& plan, const PlanOp& op, Queue& queue) {
  const BufferUse* rounded = find_use(plan, op, BufferKind::kRoundedGrad, Tier::kDevice);
  std::byte* sums = norm_row(plan);
  RoundGradArgs args;
  args.grad = reinterpret_cast<const float*>(own_row(plan.buffer(op.uses.front())));
  args.rounded = rounded == nullptr ? nullptr : address(plan.buffer(*rounded));
  args.square_sum = reinterpret_cast<double*>(sums) + op.param;
  args.first_nonfinite =
      reinterpret_cast<int64_t*>(sums + first_nonfinite_offset(input_.layout.flat_params.size())) +
      op.param;
  args.scratch = address(plan.buffer(*find_use(plan, op, BufferKind::kNormScratch, Tier::kDevice)));
  args.numel = input_.shard_numel(op.param);
  args.out_dtype = input_.compute_dtype;
  backend_.ops().round_grad(queue, args);
}

// Of all FlatParams: the step's norm, and clipping. Of one alone: whether its update is applied.
void Executor::issue_finish_norm(const StepPlan& plan, const PlanOp& op, const WalkInput& input,
                                 Queue& queue) {
  const size_t params = input_.layout.flat_params.size();
  const std::byte* sums = address(plan.buffers[static_cast<size_t>(plan.norm_sums)]);
  FinishNormArgs args;
  args.square_sums = reinterpret_cast<const double*>(sums);
  args.first_nonfinite = reinterpret_cast<const int64_t*>(sums + first_nonfinite_offset(params));
  args.params = static_cast<int64_t>(params);
  args.ranks = input_.world_size;
  args.rank_stride = static_cast<int64_t>(norm_row_bytes(params) / sizeof(double));
  args.max_norm = input.max_grad_norm;
  if (op.param >= 0) {
    args.square_sums += op.param;
    args.first_nonfinite += op.param;
    args.params = 1;
    args.max_norm = 0;
  }
  args.loss_scale = input.loss_scale;
  args.out = reinterpret_cast<StepScalars*>(
      address(plan.buffer(*find_use(plan, op, BufferKind::kScalars, Tier::kDevice))));
  backend_.ops().finish_norm(queue, args);
}

void Executor::issue_device_adam(const StepPlan& plan, const PlanOp& op, const AdamHyper& hyper,
                                 Queue& queue) {
  std::byte* base = address(plan.buffer(*find_use(plan, op, BufferKind::kState, Tier::kDevice)));
  const std::byte* grad = address(plan.buffer(op.uses.front()));  // the gradient comes first
  const StatePlanes planes =
      state_planes(input_.shard_numel(op.param), input_.compute_dtype, input_.moment_dtype);
  const int64_t first = shard_range(input_.layout.flat_params[static_cast<size_t>(op.param)].numel,
                                    ranks_.rank(), input_.world_size)
                            .begin;
  const auto* scalars = reinterpret_cast<const StepScalars*>(
      address(plan.buffer(*find_use(plan, op, BufferKind::kScalars, Tier::kDevice))));
  for (const DecayRun& run : decay_runs_[static_cast<size_t>(op.param)]) {
    const int64_t begin = run.begin - first;
    DeviceAdamArgs args{adam_shard(planes, state_address(planes, base), begin, run.numel), hyper,
                        scalars};
    args.shard.grad = grad + static_cast<size_t>(begin) * dtype_bytes(input_.compute_dtype);
    args.shard.rng_offset = run.begin;
    if (!run.decay) args.hyper.weight_decay = 0;
    args.hyper.seed = param_seed(args.hyper.seed, op.param);
    backend_.ops().device_adam(queue, args);
  }
}

}  // namespace orlop

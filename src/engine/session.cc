#include "engine/session.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/check.h"
#include "cpu_adam/cpu_features.h"
#include "engine/check_config.h"
#include "engine/ranks.h"
#include "formats/hf_config.h"
#include "memory/available_memory.h"

namespace orlop {
namespace {

// Of the memory that is free now, what states may take when no budget is given.
constexpr double kHostShare = 0.9;

DType compute_dtype(Precision precision) {
  switch (precision) {
    case Precision::kF32:
      return DType::kF32;
    case Precision::kBF16:
      return DType::kBF16;
    case Precision::kF16:
      return DType::kF16;
  }
  return DType::kF32;
}

void describe_blocks(Planning& planning, DType dtype) {
  PlanInput& input = planning.input;
  const Ops& ops = planning.device.backend->ops();
  const int count = static_cast<int>(input.layout.blocks.size());
  for (int b = 0; b < count; ++b) {
    planning.blocks.push_back(make_block(planning.model, input.layout, b, dtype));
    const Block& block = *planning.blocks.back();
    input.forward_workspace_bytes.push_back(block.workspace_bytes(ops, input.shape, false));
    input.backward_workspace_bytes.push_back(block.workspace_bytes(ops, input.shape, true));
    input.forward_flops.push_back(block_forward_flops(
        planning.model, input.layout.blocks[static_cast<size_t>(b)].kind, input.shape));
  }
  const int params = static_cast<int>(input.layout.flat_params.size());
  for (int param = 0; param < params; ++param) {
    input.norm_scratch_bytes.push_back(ops.grad_norm_scratch_bytes(input.shard_numel(param)));
  }
}

// What all ranks must plan with.
void agree_before(Planning& planning, Communicator& ranks) {
  Budgets& budgets = planning.budgets;
  budgets.device_bytes = least_over_ranks(ranks, "device budget", budgets.device_bytes);
  budgets.host_bytes = least_over_ranks(ranks, "host budget", budgets.host_bytes);
  HardwareProfile& profile = planning.profile;
  const std::array<double*, 9> figures = {
      &profile.matmul_flop_per_s,     &profile.upload_bytes_per_s,
      &profile.offload_bytes_per_s,   &profile.device_bytes_per_s,
      &profile.host_bytes_per_s,      &profile.collective_bytes_per_s,
      &profile.nvme_read_bytes_per_s, &profile.nvme_write_bytes_per_s,
      &profile.launch_seconds};
  std::array<double, 9> values{};
  for (size_t i = 0; i < values.size(); ++i) values[i] = *figures[i];
  ranks.broadcast_values(std::as_writable_bytes(std::span(values)), 0, "hardware profile");
  for (size_t i = 0; i < values.size(); ++i) *figures[i] = values[i];
}

// Ranks with other models, configurations or devices would wait for each other in vain.
void check_same_plan(const Planning& planning, Communicator& ranks) {
  const std::string text = planning.planned.train.to_text(planning.input) +
                           planning.planned.eval.to_text(planning.input);
  const size_t own = std::hash<std::string>()(text);
  std::vector<size_t> all(static_cast<size_t>(ranks.world_size()));
  ranks.all_gather_values(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(all)),
                          "plan");
  for (size_t rank = 1; rank < all.size(); ++rank) {
    check(all[rank] == all[0], ErrorCode::kUsage,
          "ranks 0 and {} plan different steps; every rank must be given the same model, "
          "configuration and kind of device",
          rank);
  }
}

}  // namespace

Planning make_planning(const std::string& model_dir, const EngineConfig& config,
                       const PlanningRanks& ranks, Tracer* tracer) {
  Planning planning;
  planning.model = make_transformer_config(read_hf_config(model_dir));
  check_config(config, planning.model);
  planning.threads =
      config.threads > 0 ? config.threads : std::max(1, default_threads() / ranks.local);
  planning.device = make_backend(config, ranks.local, planning.threads, tracer);
  const DeviceInfo info = planning.device.backend->info();
  // The thread that issues the step and the driver's need a core of their own: sharing one with the
  // optimizer's team made every update wait for it (1.5 times as long on 16 cores).
  if (!info.is_host && config.threads == 0) planning.threads = std::max(1, planning.threads - 1);
  const DType dtype = compute_dtype(config.precision);

  PlanInput& input = planning.input;
  input.layout = make_layout(planning.model);
  input.world_size = ranks.world_size;
  input.compute_dtype = dtype;
  input.moment_dtype = config.optimizer.moments;
  input.shape = {config.batch.micro_batch_size * config.batch.sequence_length,
                 config.batch.sequence_length};
  input.hidden = planning.model.hidden;
  input.micro_batches = static_cast<int>(config.batch.accumulation_steps);
  if (planning.model.rope.enabled) {
    input.rope_bytes =
        static_cast<size_t>(config.batch.sequence_length * planning.model.rope.rotary_dim) *
        sizeof(float);
  }
  input.device_fixed_bytes = info.overhead_bytes + info.workspace_bytes;
  input.device_is_host = info.is_host;
  input.updates_wait_for_norm =
      config.optimizer.max_grad_norm > 0 || config.precision == Precision::kF16 ||
      ranks.world_size > 1;  // whether a gradient is finite, all ranks know with the norm
  size_t all_states = 0;
  for (size_t param = 0; param < input.layout.flat_params.size(); ++param)
    all_states += input.state_bytes(static_cast<int>(param));
  input.snapshot_bytes = std::min(config.limits.snapshot_bytes, all_states);
  describe_blocks(planning, dtype);

  planning.budgets.device_bytes = planning.device.device_budget_bytes;
  planning.budgets.host_bytes = config.limits.host_bytes.value_or(static_cast<size_t>(
                                    static_cast<double>(available_host_bytes()) * kHostShare)) /
                                static_cast<size_t>(ranks.local);
  planning.profile = load_profile(info.name, info.is_host, planning.threads, dtype);
  if (ranks.ranks != nullptr && ranks.world_size > 1) agree_before(planning, *ranks.ranks);
  planning.planned = make_placement(input, planning.budgets, config.placement, planning.profile);
  planning.report = make_report(input, planning.planned, planning.budgets, planning.profile);
  planning.report.model = fmt::format("{} ({} layers x {})", planning.model.model_type,
                                      planning.model.layers, planning.model.hidden);
  planning.report.device = info.name;
  if (ranks.ranks != nullptr && ranks.world_size > 1) check_same_plan(planning, *ranks.ranks);
  return planning;
}

Session::Session(Planning planning, const EngineConfig& config, Communicator& ranks, Tracer* tracer)
    : ranks_(ranks),
      host_arena_(std::max(planning.planned.train.host_bytes, planning.planned.eval.host_bytes)),
      planning_(std::move(planning)),
      tracer_(tracer),
      sequence_length_(config.batch.sequence_length) {
  ExecutorMemory memory = take_memory();
  gates_ = memory.gates;
  upload_rope(memory.device);
  executor_ = std::make_unique<Executor>(
      backend(), planning_.input, planning_.blocks, std::move(memory),
      BatchLimits{sequence_length_, planning_.model.vocab_size, planning_.model.max_positions},
      ranks_);
}

ExecutorMemory Session::take_memory() {
  const PlannedStep& planned = planning_.planned;
  if (!backend().info().is_host) {
    host_arena_.register_with(
        [&](void* address, size_t bytes) { backend().register_host_memory(address, bytes); });
  }
  ExecutorMemory memory;
  memory.device = static_cast<std::byte*>(
      backend().allocate_arena(std::max(planned.train.device_bytes, planned.eval.device_bytes)));
  memory.host = host_arena_.data();
  memory.scalars =
      memory.host + planned.train.buffers[static_cast<size_t>(planned.train.host_scalars)].offset;
  auto* gates = reinterpret_cast<std::atomic<uint32_t>*>(memory.scalars + kGatesOffset);
  for (size_t param = 0; param < layout().flat_params.size(); ++param) {
    memory.gates.push_back({new (gates + param) std::atomic<uint32_t>(0)});
  }
  gates += layout().flat_params.size();
  for (size_t param = 0; param < layout().flat_params.size(); ++param) {
    memory.saved.push_back({new (gates + param) std::atomic<uint32_t>(0)});
  }
  states_ = std::make_unique<StateStore>(make_state_store(memory, QueueKind::kOffload));
  make_save(memory);
  return memory;
}

void Session::make_save(const ExecutorMemory& memory) {
  const StepPlan& plan = train_plan();
  BackgroundSaveParts parts{.layout = layout(),
                            .ranks = ranks_.beside(),
                            .states = make_state_store(memory, QueueKind::kSave)};
  parts.update_order = update_order(plan);
  parts.copied = snapshot_count(planning_.input, parts.update_order);
  if (plan.snapshot >= 0) {
    parts.snapshot = memory.host + plan.buffers[static_cast<size_t>(plan.snapshot)].offset;
  }
  parts.updated = memory.gates;
  for (size_t param = 0; param < parts.updated.size(); ++param) {
    if (states_->host_states(static_cast<int>(param)) == nullptr) parts.updated[param] = {};
  }
  parts.saved = memory.saved;
  parts.tracer = tracer_;
  save_ = std::make_unique<BackgroundSave>(std::move(parts));
}

StateStore Session::make_state_store(const ExecutorMemory& memory, QueueKind down) {
  return StateStore(backend(), planning_.input, train_plan(), ranks_.rank(),
                    {memory.device, memory.host}, down);
}

void Session::upload_rope(std::byte* device) {
  if (planning_.input.rope_bytes == 0) return;
  const std::vector<float> table = rope_table(planning_.model.rope, sequence_length_);
  const StepPlan& plan = planning_.planned.train;
  Queue& upload = backend().queue(QueueKind::kUpload);
  upload.upload(device + plan.buffers[static_cast<size_t>(plan.rope)].offset, table.data(),
                table.size() * sizeof(float));
  upload.synchronize();
}

std::vector<HostUpdate> Session::host_updates(uint64_t seed) {
  std::vector<HostUpdate> updates;
  const StepPlan& plan = train_plan();
  for (const PlanOp& op : plan.ops) {
    if (op.kind != OpKind::kHostAdam) continue;
    const PlanBuffer& grad =
        plan.buffer(*find_use(plan, op, BufferKind::kRoundedGrad, Tier::kHost));
    updates.push_back(host_update(op.param, host_arena_.data() + grad.offset, seed));
  }
  return updates;
}

HostUpdate Session::host_update(int param, const std::byte* grad, uint64_t seed) const {
  const StatePlanes& planes = states_->planes(param);
  std::byte* base = states_->host_states(param);
  HostUpdate update{param, {}, gates_[static_cast<size_t>(param)]};
  const ShardRange& own = states_->shard(param);
  for (const DecayRun& run : decay_runs(layout().flat_params[static_cast<size_t>(param)], own)) {
    const size_t begin = static_cast<size_t>(run.begin - own.begin);
    AdamShard shard;
    shard.compute_dtype = planes.compute_dtype;
    shard.moment_dtype = planes.moment_dtype;
    shard.grad_dtype = planes.compute_dtype;
    const bool has_copy = planes.compute_dtype != DType::kF32;
    if (has_copy) shard.param = base + begin * dtype_bytes(planes.compute_dtype);
    if (planes.compute_dtype == DType::kBF16) {
      shard.lo = reinterpret_cast<uint16_t*>(base + planes.lo) + begin;
    } else {
      shard.master = reinterpret_cast<float*>(base + planes.master) + begin;
    }
    shard.exp_avg = base + planes.exp_avg + begin * dtype_bytes(planes.moment_dtype);
    shard.exp_avg_sq = base + planes.exp_avg_sq + begin * dtype_bytes(planes.moment_dtype);
    shard.grad = grad + begin * dtype_bytes(planes.compute_dtype);
    shard.numel = run.numel;
    shard.rng_offset = run.begin;
    update.parts.push_back({shard, run.decay, param_seed(seed, param)});
  }
  return update;
}

}  // namespace orlop

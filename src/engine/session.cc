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
#include "nvme/drive_report.h"
#include "nvme/shard_file.h"
#include "zero/pinned_ranges.h"

namespace orlop {

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

namespace {

// Of the memory that is free now, what states may take when no budget is given.
constexpr double kHostShare = 0.9;
// Likewise of the space that is free on the drives.
constexpr double kNvmeShare = 0.9;

void describe_blocks(Planning& planning, DType dtype) {
  PlanInput& input = planning.input;
  const Ops& ops = planning.device.backend->ops();
  const int count = static_cast<int>(input.layout.blocks.size());
  for (int b = 0; b < count; ++b) {
    planning.blocks.push_back(make_block(planning.model, input.layout, b, dtype));
    const Block& block = *planning.blocks.back();
    input.forward_workspace_bytes.push_back(block.workspace_bytes(ops, input.shape, false));
    input.backward_workspace_bytes.push_back(block.workspace_bytes(ops, input.shape, true));
    const BlockKind kind = input.layout.blocks[static_cast<size_t>(b)].kind;
    input.forward_flops.push_back(block_forward_flops(planning.model, kind, input.shape));
    input.attention_flops.push_back(block_attention_flops(planning.model, kind, input.shape));
    input.forward_bytes.push_back(block_forward_bytes(planning.model, kind, input.shape, dtype));
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
  budgets.nvme_bytes = least_over_ranks(ranks, "nvme budget", budgets.nvme_bytes);
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

// Before the device's budget is measured.
void prepare_wire(const EngineConfig& config, Communicator& ranks) {
  const bool narrow = config.gradient_wire != DType::kF32 && !config.evaluate_only;
  const size_t least = least_over_ranks(ranks, "gradient wire", narrow ? 1 : 0);
  const size_t most = most_over_ranks(ranks, "gradient wire", narrow ? 1 : 0);
  check(least == most, ErrorCode::kUsage,
        "gradient_wire is {} on rank {} and another dtype on others; give every rank the same",
        dtype_name(config.gradient_wire), ranks.rank());
  if (narrow) ranks.prepare_all_to_all();
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
  planning.threads = config.threads > 0  ? config.threads
                     : ranks.threads > 0 ? ranks.threads
                                         : std::max(1, default_threads() / ranks.local);
  if (ranks.ranks != nullptr && ranks.world_size > 1) prepare_wire(config, *ranks.ranks);
  planning.device = make_backend(config, ranks.local, planning.threads, tracer);
  const DeviceInfo info = planning.device.backend->info();
  // The thread that issues the step and the driver's have a core of their own.
  if (!info.is_host && config.threads == 0) planning.threads = std::max(1, planning.threads - 1);
  const DType dtype = compute_dtype(config.precision);

  PlanInput& input = planning.input;
  input.layout = make_layout(planning.model);
  input.world_size = ranks.world_size;
  input.compute_dtype = dtype;
  input.moment_dtype = config.optimizer.moments;
  input.gradient_wire = config.gradient_wire;
  input.shape = {config.batch.micro_batch_size * config.batch.sequence_length,
                 config.batch.sequence_length};
  input.hidden = planning.model.hidden;
  input.evaluates_only = config.evaluate_only;
  input.micro_batches =
      config.evaluate_only ? 1 : static_cast<int>(config.batch.accumulation_steps);
  if (planning.model.rope.enabled) {
    input.rope_bytes =
        static_cast<size_t>(config.batch.sequence_length * planning.model.rope.rotary_dim) *
        sizeof(float);
  }
  input.device_fixed_bytes = info.overhead_bytes + info.workspace_bytes;
  input.device_is_host = info.is_host;
  input.updates_wait_for_norm =
      config.evaluate_only || config.optimizer.max_grad_norm > 0 ||
      config.precision == Precision::kF16 ||
      ranks.world_size > 1;  // whether a gradient is finite, all ranks know with the norm
  size_t all_states = 0;
  for (size_t param = 0; param < input.layout.flat_params.size(); ++param)
    all_states += input.state_bytes(static_cast<int>(param));
  if (!config.evaluate_only) {
    input.snapshot_bytes = std::min(config.limits.snapshot_bytes, all_states);
  }
  describe_blocks(planning, dtype);

  planning.budgets.device_bytes = planning.device.device_budget_bytes;
  planning.budgets.host_bytes = config.limits.host_bytes.value_or(static_cast<size_t>(
                                    static_cast<double>(available_host_bytes()) * kHostShare)) /
                                static_cast<size_t>(ranks.local);
  if (!config.nvme.paths.empty()) {
    const double free = static_cast<double>(nvme::free_disk_bytes(config.nvme.paths) +
                                            nvme::leftover_swap_bytes(config.nvme.paths));
    planning.budgets.nvme_bytes =
        config.limits.nvme_bytes.value_or(static_cast<size_t>(kNvmeShare * free)) /
        static_cast<size_t>(ranks.local);
  }
  planning.profile =
      share_of_machine(load_profile(info, planning.threads, dtype), ranks.local, info.is_host);
  if (ranks.ranks != nullptr && ranks.world_size > 1) agree_before(planning, *ranks.ranks);
  PlacementConfig wanted = config.placement;
  if (config.evaluate_only) {  // what is between forward and backward
    wanted.activations.reset();
    wanted.wave.reset();
  }
  planning.planned = make_placement(input, planning.budgets, wanted, planning.profile);
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
  take_drives(config);
  ExecutorMemory memory = take_memory();
  gates_ = memory.gates;
  upload_rope(memory.device);
  executor_ = std::make_unique<Executor>(
      backend(), planning_.input, planning_.blocks, std::move(memory),
      BatchLimits{sequence_length_, planning_.model.vocab_size, planning_.model.max_positions},
      ranks_);
}

void Session::take_drives(const EngineConfig& config) {
  const PlannedStep& planned = planning_.planned;
  if (!planned.placement.uses_nvme()) return;
  // All ranks of a run may share a directory, and know each other there by its name.
  std::array<char, 64> run{};
  nvme::default_run_id().copy(run.data(), run.size() - 1);
  if (ranks_.world_size() > 1) {
    ranks_.broadcast_values(std::as_writable_bytes(std::span(run)), 0, "drives");
  }
  on_all_ranks(ranks_, "drives", [&] {
    swap_ = std::make_unique<SwapSpace>(planning_.input, planned.placement, planned.train, config,
                                        SwapOwner{ranks_.rank(), run.data()});
  });
  // All slots lie side by side.
  const std::vector<int>& slots = planned.train.swap_slots;
  if (slots.empty()) return;
  const PlanBuffer& first = planned.train.buffers[static_cast<size_t>(slots.front())];
  swap_->swapper().register_memory({host_arena_.data() + first.offset, slots.size() * first.bytes},
                                   first.bytes);
}

ExecutorMemory Session::take_memory() {
  const PlannedStep& planned = planning_.planned;
  if (!backend().info().is_host) {
    for (const ArenaRange& range : pinned_ranges(planning_.input, planned)) {
      backend().register_host_memory(host_arena_.data() + range.begin, range.end - range.begin);
    }
  }
  ExecutorMemory memory;
  memory.device = static_cast<std::byte*>(
      backend().allocate_arena(std::max(planned.train.device_bytes, planned.eval.device_bytes)));
  memory.host = host_arena_.data();
  const StepPlan& plan = main_plan();
  memory.scalars = memory.host + plan.buffers[static_cast<size_t>(plan.host_scalars)].offset;
  auto* gates = reinterpret_cast<std::atomic<uint32_t>*>(memory.scalars + kGatesOffset);
  for (size_t param = 0; param < layout().flat_params.size(); ++param) {
    memory.gates.push_back({new (gates + param) std::atomic<uint32_t>(0)});
  }
  gates += layout().flat_params.size();
  for (size_t param = 0; param < layout().flat_params.size(); ++param) {
    memory.saved.push_back({new (gates + param) std::atomic<uint32_t>(0)});
  }
  gates += layout().flat_params.size();
  memory.swapped_in = {new (gates) std::atomic<uint32_t>(0)};
  memory.swapped_out = {new (gates + 1) std::atomic<uint32_t>(0)};
  memory.swap = swap_.get();
  state_memory_ = {memory.device, memory.host, swap_.get()};
  states_ = std::make_unique<StateStore>(make_state_store(QueueKind::kOffload, 2));
  make_save(memory);
  return memory;
}

void Session::make_save(const ExecutorMemory& memory) {
  const StepPlan& plan = train_plan();
  BackgroundSaveParts parts{.layout = layout(),
                            .ranks = ranks_.beside(),
                            .states = make_state_store(QueueKind::kSave, 1)};
  parts.update_order = update_order(plan);
  parts.copied = snapshot_count(planning_.input, parts.update_order);
  if (plan.snapshot >= 0) {
    parts.snapshot = memory.host + plan.buffers[static_cast<size_t>(plan.snapshot)].offset;
  }
  parts.updated = memory.gates;
  for (size_t param = 0; param < parts.updated.size(); ++param) {
    if (states_->tier(static_cast<int>(param)) == Tier::kDevice) parts.updated[param] = {};
  }
  parts.saved = memory.saved;
  parts.tracer = tracer_;
  save_ = std::make_unique<BackgroundSave>(std::move(parts));
}

// Each store has a slot of its own, so many from the end.
StateStore Session::make_state_store(QueueKind down, size_t slot_from_end) {
  const StepPlan& plan = main_plan();
  StateMemory memory = state_memory_;
  if (!plan.swap_slots.empty()) {
    const int slot = plan.swap_slots[plan.swap_slots.size() - slot_from_end];
    memory.slot = memory.of(plan.buffers[static_cast<size_t>(slot)]);
  }
  return StateStore(backend(), planning_.input, plan, ranks_.rank(), memory, down,
                    planning_.threads);
}

void Session::upload_rope(std::byte* device) {
  if (planning_.input.rope_bytes == 0) return;
  const std::vector<float> table = rope_table(planning_.model.rope, sequence_length_);
  const StepPlan& plan = main_plan();
  Queue& upload = backend().queue(QueueKind::kUpload);
  upload.upload(device + plan.buffers[static_cast<size_t>(plan.rope)].offset, table.data(),
                table.size() * sizeof(float));
  upload.synchronize();
}

HostUpdates Session::host_updates(uint64_t seed) {
  HostUpdates updates;
  updates.gates = gates_;
  for (const PlanOp& op : train_plan().ops) {
    if (is_host_update(op.kind)) updates.ops.push_back(update_op(op, seed));
  }
  if (swap_ != nullptr) {
    updates.swapper = &swap_->swapper();
    updates.versions = &swap_->versions();
    updates.slots = static_cast<int>(train_plan().swap_slots.size());
  }
  return updates;
}

UpdateOp Session::update_op(const PlanOp& op, uint64_t seed) const {
  const StepPlan& plan = train_plan();
  UpdateOp update;
  update.param = op.param;
  const bool by_chunks = op.chunk.index >= 0;
  const bool is_end = op.chunk.begin + op.chunk.numel == input().shard_numel(op.param);
  if (by_chunks) {
    const BufferUse& slot = *find_use(plan, op, BufferKind::kSwapSlot, Tier::kHost);
    const auto found = std::find(plan.swap_slots.begin(), plan.swap_slots.end(), slot.buffer);
    update.slot = static_cast<int>(found - plan.swap_slots.begin());
    if (op.kind != OpKind::kHostAdam) {
      update.pieces = swap_->chunk_pieces(op.param, op.chunk, state_memory_.of(plan.buffer(slot)));
    }
  }
  switch (op.kind) {
    case OpKind::kHostAdam:
      update.parts = update_parts(op, seed);
      update.is_last = !by_chunks && is_end;
      break;
    case OpKind::kSwapInStates:
      update.kind = UpdateOp::Kind::kSwapIn;
      break;
    default:
      update.kind = UpdateOp::Kind::kSwapOut;
      update.is_last = is_end;
  }
  return update;
}

// The runs of elements with one weight decay among those that `op` updates.
std::vector<UpdatePart> Session::update_parts(const PlanOp& op, uint64_t seed) const {
  const StepPlan& plan = train_plan();
  const auto address_of = [&](BufferKind kind) {
    return state_memory_.of(plan.buffer(*find_use(plan, op, kind, Tier::kHost)));
  };
  const bool by_chunks = op.chunk.index >= 0;
  const StateAddress whole = states_->host_states(op.param);
  const StatePlanes planes = by_chunks ? swap_->planes(op.chunk) : states_->host_planes(op.param);
  const StateAddress base =
      by_chunks ? swap_->address(op.param, op.chunk, address_of(BufferKind::kSwapSlot), whole.copy)
                : whole;
  const std::byte* grads = address_of(BufferKind::kRoundedGrad);
  std::vector<UpdatePart> parts;
  const ShardRange& own = states_->shard(op.param);
  for (const DecayRun& run : decay_runs(layout().flat_params[static_cast<size_t>(op.param)], own)) {
    const ElementRange part =
        intersect({run.begin - own.begin, run.numel}, {op.chunk.begin, planes.numel});
    if (part.numel == 0) continue;
    AdamShard shard = adam_shard(planes, base, part.begin - op.chunk.begin, part.numel);
    shard.grad = grads + static_cast<size_t>(part.begin) * dtype_bytes(planes.compute_dtype);
    shard.rng_offset = own.begin + part.begin;
    parts.push_back({shard, run.decay, param_seed(seed, op.param)});
  }
  return parts;
}

}  // namespace orlop

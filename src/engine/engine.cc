#include "orlop/engine.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <utility>

#include "base/bytes.h"
#include "base/check.h"
#include "cpu_adam/cpu_features.h"
#include "engine/backend_factory.h"
#include "engine/checkpoint.h"
#include "engine/executor.h"
#include "engine/model_files.h"
#include "engine/state_store.h"
#include "formats/hf_config.h"
#include "formats/manifest.h"
#include "memory/available_memory.h"
#include "memory/host_arena.h"
#include "optim/grad_scaler.h"
#include "optim/lr_schedule.h"
#include "optim/optimizer_queue.h"
#include "zero/placement_plan.h"

namespace orlop {
namespace {

namespace fs = std::filesystem;

// On a host this small, an update beside the next forward takes the cores that compute needs.
constexpr int kFewCores = 4;
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

void check_config(const EngineConfig& config, const TransformerConfig& model) {
  const BatchConfig& batch = config.batch;
  const auto positive = [](int64_t value, const char* field) {
    check(value >= 1, ErrorCode::kUsage, "{} is {}; it must be at least 1", field, value);
  };
  positive(batch.micro_batch_size, "batch.micro_batch_size");
  positive(batch.sequence_length, "batch.sequence_length");
  positive(batch.accumulation_steps, "batch.accumulation_steps");
  positive(config.schedule.total_steps, "schedule.total_steps");
  positive(config.max_skipped_steps, "max_skipped_steps");
  check(batch.sequence_length <= model.max_positions, ErrorCode::kUsage,
        "batch.sequence_length is {}; the model allows {} (max_position_embeddings)",
        batch.sequence_length, model.max_positions);
  check(batch.micro_batch_size * batch.sequence_length < (int64_t{1} << 31), ErrorCode::kUsage,
        "a micro-batch of {} x {} tokens has more than 2^31 - 1", batch.micro_batch_size,
        batch.sequence_length);
  const OptimizerConfig& optimizer = config.optimizer;
  check(optimizer.max_grad_norm >= 0, ErrorCode::kUsage,
        "optimizer.max_grad_norm is {}; 0 switches clipping off", optimizer.max_grad_norm);
  check(optimizer.moments == DType::kF32 || optimizer.moments == DType::kBF16, ErrorCode::kUsage,
        "optimizer.moments is {}; it may be F32 or BF16", dtype_name(optimizer.moments));
}

LrScheduleConfig schedule_config(const EngineConfig& config) {
  LrScheduleConfig schedule;
  switch (config.schedule.kind) {
    case ScheduleKind::kConstant:
      schedule.kind = LrScheduleKind::kConstant;
      break;
    case ScheduleKind::kLinear:
      schedule.kind = LrScheduleKind::kLinear;
      break;
    case ScheduleKind::kCosine:
      schedule.kind = LrScheduleKind::kCosine;
      break;
    case ScheduleKind::kWsd:
      schedule.kind = LrScheduleKind::kWsd;
      break;
  }
  schedule.peak_lr = config.optimizer.learning_rate;
  schedule.total_steps = config.schedule.total_steps;
  schedule.warmup_steps = config.schedule.warmup_steps;
  schedule.decay_steps = static_cast<int64_t>(config.schedule.decay_ratio *
                                              static_cast<double>(config.schedule.total_steps));
  schedule.min_ratio = config.schedule.min_lr_ratio;
  return schedule;
}

GradScalerConfig scaler_config(const EngineConfig& config) {
  GradScalerConfig scaler;
  scaler.max_failures = config.max_skipped_steps;
  if (config.precision != Precision::kF16) {
    scaler.dynamic = false;
    scaler.initial_scale = 1;
  }
  return scaler;
}

// Everything that is known before memory is taken.
struct Planning {
  TransformerConfig model;
  BackendChoice device;
  std::vector<std::unique_ptr<Block>> blocks;
  PlanInput input;
  Budgets budgets;
  PlannedStep planned;
  PlanReport report;
  int threads = 1;
};

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
  for (const FlatParamLayout& flat : input.layout.flat_params) {
    input.norm_scratch_bytes.push_back(ops.grad_norm_scratch_bytes(flat.numel));
  }
}

Planning make_planning(const std::string& model_dir, const EngineConfig& config, Tracer* tracer) {
  Planning planning;
  planning.model = make_transformer_config(read_hf_config(model_dir));
  check_config(config, planning.model);
  planning.threads = config.threads > 0 ? config.threads : default_threads();
  planning.device = make_backend(config, planning.threads, tracer);
  const DeviceInfo info = planning.device.backend->info();
  const DType dtype = compute_dtype(config.precision);

  PlanInput& input = planning.input;
  input.layout = make_layout(planning.model);
  input.compute_dtype = dtype;
  input.moment_dtype = config.optimizer.moments;
  input.shape = {config.batch.micro_batch_size * config.batch.sequence_length,
                 config.batch.sequence_length};
  input.hidden = planning.model.hidden;
  input.micro_batches = static_cast<int>(config.batch.accumulation_steps);
  input.clipping = config.optimizer.max_grad_norm > 0;
  if (planning.model.rope.enabled) {
    input.rope_bytes = static_cast<size_t>(config.batch.sequence_length * planning.model.rope.rotary_dim) *
                       sizeof(float);
  }
  input.device_fixed_bytes = info.overhead_bytes + info.workspace_bytes;
  input.device_is_host = info.is_host;
  describe_blocks(planning, dtype);

  planning.budgets.device_bytes = planning.device.device_budget_bytes;
  planning.budgets.host_bytes = config.limits.host_bytes.value_or(
      static_cast<size_t>(static_cast<double>(available_host_bytes()) * kHostShare));
  const HardwareProfile profile = load_profile(info.name, info.is_host, planning.threads);
  planning.planned = make_placement(input, planning.budgets, config.placement, profile);
  planning.report = make_report(input, planning.planned, planning.budgets, profile);
  planning.report.model =
      fmt::format("{} ({} layers x {})", planning.model.model_type, planning.model.layers, planning.model.hidden);
  planning.report.device = info.name;
  return planning;
}

}  // namespace

class Engine::Impl {
 public:
  Impl(std::string model_dir, const EngineConfig& config)
      : config_(config),
        model_dir_(std::move(model_dir)),
        planning_(make_planning(model_dir_, config, &tracer_)),
        schedule_(schedule_config(config)),
        scaler_(scaler_config(config)) {
    take_memory();
    load_weights(model_dir_, layout(), *states_);
    start_optimizer();
  }

  const EngineConfig& config() const { return config_; }
  const PlanReport& report() const { return planning_.report; }
  int64_t steps_done() const { return applied_steps_; }

  StepResult step(std::span<const MicroBatch> batches) {
    return changing([&] { return run_step(batches); });
  }

  EvalResult evaluate(std::span<const MicroBatch> batches) {
    return changing([&] {
      EvalResult result;
      double loss_sum = 0;
      for (size_t i = 0; i < batches.size(); ++i) {
        const bool has_label = std::any_of(batches[i].labels.begin(), batches[i].labels.end(),
                                           [](int32_t label) { return label >= 0; });
        if (!has_label) continue;
        WalkInput input;
        input.batches = batches.subspan(i, 1);
        input.version = version_;
        const WalkResult walk = executor_->walk(planning_.planned.eval, input);
        loss_sum += walk.loss_sum;
        result.labelled_tokens += walk.labelled_tokens;
      }
      check(result.labelled_tokens > 0, ErrorCode::kInvalidData,
            "evaluate: no token of the {} micro-batches has a label", batches.size());
      result.loss = loss_sum / static_cast<double>(result.labelled_tokens);
      return result;
    });
  }

  std::vector<TensorDescription> tensors() const {
    std::vector<TensorDescription> all;
    for (const FlatParamLayout& flat : layout().flat_params) {
      for (const Segment& segment : flat.segments) all.push_back({segment.name, segment.shape, segment.decay});
    }
    return all;
  }

  void read_state(const std::string& tensor, StateKind kind, std::span<float> values) {
    reading([&] {
      const Plane plane = kind == StateKind::kMaster   ? Plane::kMaster
                          : kind == StateKind::kExpAvg ? Plane::kExpAvg
                                                       : Plane::kExpAvgSq;
      for (size_t param = 0; param < layout().flat_params.size(); ++param) {
        const Segment* segment = layout().flat_params[param].find(tensor);
        if (segment == nullptr) continue;
        check(static_cast<int64_t>(values.size()) == segment->numel, ErrorCode::kUsage,
              "read_state: '{}' has {} elements, the buffer {}", tensor, segment->numel, values.size());
        const int index = static_cast<int>(param);
        states_->with_states(index, false, [&](std::byte* base) {
          read_plane(states_->planes(index), base, plane, segment->offset, values);
        });
        return 0;
      }
      fail(ErrorCode::kUsage, "read_state: the model has no tensor '{}'", tensor);
    });
  }

  std::string save_checkpoint(const std::string& run_dir, const std::string& user_state, int keep) {
    check(keep >= 1, ErrorCode::kUsage, "save_checkpoint: keep is {}; it must be at least 1", keep);
    return reading([&] {
      const TrainingState training{applied_steps_, scaler_.state(), user_state};
      return save_training(run_dir, static_cast<size_t>(keep), layout(), *states_, training).string();
    });
  }

  std::string load_checkpoint(const std::string& step_dir) {
    optimizer_->wait_idle();
    return changing([&] {
      const TrainingState training = load_training(step_dir, layout(), *states_);
      scaler_.restore(training.scaler);
      applied_steps_ = training.steps;
      return training.user_state;
    });
  }

  void export_hf(const std::string& out_dir, size_t max_shard_bytes) {
    reading([&] {
      export_weights(model_dir_, out_dir, layout(), *states_, max_shard_bytes);
      return 0;
    });
  }

  Stats stats() const {
    Stats stats;
    stats.steps = applied_steps_;
    stats.skipped_steps = scaler_.state().skipped_steps;
    stats.uploaded_bytes = executor_->uploaded_bytes();
    stats.offloaded_bytes = executor_->offloaded_bytes();
    stats.device_peak_bytes = planning_.report.device_peak_bytes;
    stats.host_bytes = host_arena_->capacity_bytes();
    stats.optimizer_seconds = optimizer_->busy_seconds();
    stats.optimizer_exposed_seconds = exposed_seconds_;
    return stats;
  }

  Tracer& tracer() { return tracer_; }

 private:
  const ModelLayout& layout() const { return planning_.input.layout; }
  Backend& backend() { return *planning_.device.backend; }

  void take_memory() {
    const PlannedStep& planned = planning_.planned;
    host_arena_ = std::make_unique<HostArena>(std::max(planned.train.host_bytes, planned.eval.host_bytes));
    if (!backend().info().is_host) {
      host_arena_->register_with(
          [&](void* address, size_t bytes) { backend().register_host_memory(address, bytes); });
    }
    auto* device = static_cast<std::byte*>(
        backend().allocate_arena(std::max(planned.train.device_bytes, planned.eval.device_bytes)));
    std::byte* host = host_arena_->data();
    states_ = std::make_unique<StateStore>(backend(), planning_.input, planned.train, device, host);

    ExecutorMemory memory;
    memory.device = device;
    memory.host = host;
    memory.scalars = host + planned.train.buffers[static_cast<size_t>(planned.train.host_scalars)].offset;
    auto* gates = reinterpret_cast<std::atomic<uint32_t>*>(memory.scalars + kGatesOffset);
    for (size_t param = 0; param < layout().flat_params.size(); ++param) {
      memory.gates.push_back({new (gates + param) std::atomic<uint32_t>(0)});
    }
    gates_ = memory.gates;
    upload_rope(device);
    executor_ = std::make_unique<Executor>(backend(), planning_.input, planning_.blocks, std::move(memory),
                                           config_.batch.sequence_length, planning_.model.vocab_size,
                                           planning_.model.max_positions);
  }

  void upload_rope(std::byte* device) {
    if (planning_.input.rope_bytes == 0) return;
    const std::vector<float> table = rope_table(planning_.model.rope, config_.batch.sequence_length);
    const StepPlan& plan = planning_.planned.train;
    Queue& upload = backend().queue(QueueKind::kUpload);
    upload.upload(device + plan.buffers[static_cast<size_t>(plan.rope)].offset, table.data(),
                  table.size() * sizeof(float));
    upload.synchronize();
  }

  void start_optimizer() {
    std::vector<HostUpdate> updates;
    const StepPlan& plan = planning_.planned.train;
    for (const PlanBuffer& buffer : plan.buffers) {
      if (buffer.kind != BufferKind::kRoundedGrad || buffer.tier != Tier::kHost) continue;
      updates.push_back(host_update(buffer.param, host_arena_->data() + buffer.offset));
    }
    optimizer_ = std::make_unique<OptimizerQueue>(std::move(updates), planning_.threads, &tracer_);
  }

  HostUpdate host_update(int param, const std::byte* grad) const {
    const StatePlanes& planes = states_->planes(param);
    std::byte* base = states_->host_states(param);
    HostUpdate update{param, {}, gates_[static_cast<size_t>(param)]};
    for (const DecayRun& run : decay_runs(layout().flat_params[static_cast<size_t>(param)])) {
      const size_t begin = static_cast<size_t>(run.begin);
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
      update.parts.push_back({shard, run.decay, param_seed(config_.seed, param)});
    }
    return update;
  }

  StepResult run_step(std::span<const MicroBatch> batches) {
    const auto begin = std::chrono::steady_clock::now();
    AdamHyper hyper;
    hyper.lr = schedule_(applied_steps_);
    hyper.beta1 = config_.optimizer.beta1;
    hyper.beta2 = config_.optimizer.beta2;
    hyper.eps = config_.optimizer.eps;
    hyper.weight_decay = config_.optimizer.weight_decay;
    hyper.decoupled = config_.optimizer.decoupled;
    hyper.step = applied_steps_ + 1;
    hyper.seed = config_.seed;
    const float loss_scale = scaler_.scale();
    const WalkResult walk =
        executor_->walk(planning_.planned.train,
                       {.batches = batches,
                               .loss_scale = loss_scale,
                               .max_grad_norm = static_cast<float>(config_.optimizer.max_grad_norm),
                               .version = version_,
                               .hyper = hyper});
    ++version_;
    optimizer_->submit({walk.scalars, hyper, version_, hyper.step});
    if (backend().info().is_host && planning_.threads <= kFewCores) {
      const auto wait_begin = std::chrono::steady_clock::now();
      optimizer_->wait_idle();
      exposed_seconds_ += seconds_since(wait_begin);
    }
    StepResult result;
    result.loss = walk.loss_sum / static_cast<double>(walk.labelled_tokens);
    result.grad_norm = walk.scalars.grad_norm;
    result.clip = static_cast<double>(walk.scalars.grad_scale) * static_cast<double>(loss_scale);
    result.learning_rate = hyper.lr;
    result.loss_scale = static_cast<double>(loss_scale);
    result.skipped = walk.scalars.skip != 0;
    result.tokens = static_cast<int64_t>(batches.size()) * planning_.input.shape.rows;
    result.labelled_tokens = walk.labelled_tokens;
    result.step = applied_steps_ + 1;
    if (result.skipped) {
      scaler_.step_nonfinite(first_bad_text(walk.scalars));
    } else {
      scaler_.step_finite();
      ++applied_steps_;
    }
    result.seconds = seconds_since(begin);
    return result;
  }

  std::string first_bad_text(const StepScalars& scalars) const {
    if (scalars.nonfinite_param < 0) return "the gradient norm";
    const FlatParamLayout& flat = layout().flat_params[static_cast<size_t>(scalars.nonfinite_param)];
    for (const Segment& segment : flat.segments) {
      if (scalars.nonfinite_index >= segment.offset &&
          scalars.nonfinite_index < segment.offset + segment.numel) {
        return fmt::format("the gradient of '{}' ({}) at element {}", segment.name, flat.name,
                           scalars.nonfinite_index - segment.offset);
      }
    }
    return fmt::format("the gradient of {}", flat.name);
  }

  static double seconds_since(std::chrono::steady_clock::time_point begin) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

  void check_usable() const {
    check(failure_.empty(), ErrorCode::kInternal,
          "the engine failed before and refuses further work; resume from the last checkpoint. The "
          "first error was: {}",
          failure_);
  }

  // Work that changes states. After a failure that may have left them half changed, every further call is
  // refused; bad input is found before anything is issued and harms nothing.
  template <typename Work>
  auto changing(const Work& work) -> decltype(work()) {
    check_usable();
    try {
      return work();
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kUsage && error.code() != ErrorCode::kInvalidData) {
        failure_ = error.what();
      }
      throw;
    } catch (const std::exception& error) {
      failure_ = error.what();
      throw;
    }
  }

  // Work that reads states between steps: waits for the update; a failure, say of a disk, harms nothing.
  template <typename Work>
  auto reading(const Work& work) -> decltype(work()) {
    check_usable();
    optimizer_->wait_idle();
    return work();
  }

  EngineConfig config_;
  std::string model_dir_;
  Tracer tracer_;
  std::unique_ptr<HostArena> host_arena_;  // outlives the backend, which has it registered
  Planning planning_;
  LrSchedule schedule_;
  GradScaler scaler_;
  std::unique_ptr<StateStore> states_;
  std::vector<Gate> gates_;
  std::unique_ptr<Executor> executor_;
  std::unique_ptr<OptimizerQueue> optimizer_;
  int64_t applied_steps_ = 0;
  uint32_t version_ = 0;
  double exposed_seconds_ = 0;
  std::string failure_;
};

Engine::Engine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Engine::~Engine() = default;

std::unique_ptr<Engine> Engine::open(const std::string& model_dir, const EngineConfig& config) {
  return std::unique_ptr<Engine>(new Engine(std::make_unique<Impl>(model_dir, config)));
}

PlanReport Engine::plan(const std::string& model_dir, const EngineConfig& config) {
  return make_planning(model_dir, config, nullptr).report;
}

const PlanReport& Engine::plan() const { return impl_->report(); }
const EngineConfig& Engine::config() const { return impl_->config(); }
StepResult Engine::step(std::span<const MicroBatch> batches) { return impl_->step(batches); }
EvalResult Engine::evaluate(std::span<const MicroBatch> batches) { return impl_->evaluate(batches); }
int64_t Engine::steps_done() const { return impl_->steps_done(); }
std::vector<TensorDescription> Engine::tensors() const { return impl_->tensors(); }
void Engine::read_state(const std::string& tensor, StateKind kind, std::span<float> values) {
  impl_->read_state(tensor, kind, values);
}
std::string Engine::save_checkpoint(const std::string& run_dir, const std::string& user_state, int keep) {
  return impl_->save_checkpoint(run_dir, user_state, keep);
}
std::string Engine::load_checkpoint(const std::string& step_dir) { return impl_->load_checkpoint(step_dir); }
std::string Engine::latest_checkpoint(const std::string& run_dir) {
  const std::vector<CheckpointEntry> complete = list_checkpoints(run_dir);
  return complete.empty() ? "" : complete.front().folder.string();
}
void Engine::export_hf(const std::string& out_dir, size_t max_shard_bytes) {
  impl_->export_hf(out_dir, max_shard_bytes);
}
Stats Engine::stats() const { return impl_->stats(); }
void Engine::start_trace() { impl_->tracer().start(); }
void Engine::write_trace(const std::string& path) { impl_->tracer().write(path); }

}  // namespace orlop

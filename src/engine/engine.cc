#include "orlop/engine.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "base/bytes.h"
#include "base/check.h"
#include "base/owner_process.h"
#include "base/thread.h"
#include "engine/checkpoint.h"
#include "engine/drive_wear.h"
#include "engine/gather_states.h"
#include "engine/model_files.h"
#include "engine/open_engine.h"
#include "engine/ranks.h"
#include "engine/session.h"
#include "engine/update_settings.h"
#include "formats/manifest.h"
#include "nvme/drive_report.h"
#include "optim/grad_scaler.h"
#include "optim/lr_schedule.h"
#include "optim/optimizer_queue.h"

namespace orlop {
namespace {

// On a host this small, an update beside the next forward takes the cores that compute needs.
constexpr int kFewCores = 4;

}  // namespace

class Engine::Impl {
 public:
  Impl(std::string model_dir, const EngineConfig& config, std::shared_ptr<Communicator> ranks)
      : ranks_(std::move(ranks)),
        config_(config),
        model_dir_(std::move(model_dir)),
        local_(local_ranks(*ranks_)),
        affinity_(std::in_place, local_.cpus),
        session_(make_planning(model_dir_, config,
                               {.world_size = ranks_->world_size(),
                                .local = local_.count,
                                .threads = local_.threads,
                                .ranks = ranks_.get()},
                               &tracer_),
                 config, *ranks_, &tracer_),
        wear_(session_.swap(), *ranks_, local_, config.limits.nvme_writes_per_day_bytes),
        schedule_(schedule_config(config)),
        scaler_(scaler_config(config)),
        optimizer_(session_.host_updates(config.seed), session_.planning().threads, &tracer_) {
    check_room_for_checkpoint();
    on_all_ranks(*ranks_, "weights", [&] {
      if (config.from_scratch) {
        init_weights(layout(), config.seed, session_.planning().threads, session_.states());
      } else {
        load_weights(model_dir_, layout(), session_.states());
      }
    });
    affinity_.reset();
  }

  const OwnerProcess& owner() const { return owner_; }
  int rank() const { return ranks_->rank(); }
  int world_size() const { return ranks_->world_size(); }

  const EngineConfig& config() const { return config_; }
  const PlanReport& report() const { return session_.planning().report; }
  int64_t steps_done() const { return applied_steps_; }

  StepResult step(std::span<const MicroBatch> batches) {
    check_usable();
    check_trains("step");
    wear_.begin_step();
    return changing([&] { return run_step(batches); });
  }

  void synchronize() {
    changing([&] { optimizer_.wait_idle(); });
  }

  EvalResult evaluate(std::span<const MicroBatch> batches) {
    return changing([&] {
      optimizer_.wait_idle();  // the plan of an evaluation lays its own buffers over gradients
      EvalResult result;
      double loss_sum = 0;
      std::vector<std::span<const MicroBatch>> labelled;
      for (size_t i = 0; i < batches.size(); ++i) {
        const bool has_label = std::any_of(batches[i].labels.begin(), batches[i].labels.end(),
                                           [](int32_t label) { return label >= 0; });
        if (has_label) labelled.push_back(batches.subspan(i, 1));
      }
      // All ranks walk together: one with fewer micro-batches walks the rest without any.
      const size_t walks = most_over_ranks(*ranks_, "evaluation", labelled.size());
      for (size_t i = 0; i < walks; ++i) {
        WalkInput input;
        if (i < labelled.size()) input.batches = labelled[i];
        const WalkResult walk = session_.executor().walk(session_.eval_plan(), input);
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
      for (const Segment& segment : flat.segments)
        all.push_back({segment.name, segment.shape, segment.decay});
    }
    return all;
  }

  void read_state(const std::string& tensor, StateKind kind, std::span<float> values) {
    reading([&] {
      check_trains("read_state");
      const Plane plane = kind == StateKind::kMaster   ? Plane::kMaster
                          : kind == StateKind::kExpAvg ? Plane::kExpAvg
                                                       : Plane::kExpAvgSq;
      for (size_t param = 0; param < layout().flat_params.size(); ++param) {
        const Segment* segment = layout().flat_params[param].find(tensor);
        if (segment == nullptr) continue;
        check(static_cast<int64_t>(values.size()) == segment->numel, ErrorCode::kUsage,
              "read_state: '{}' has {} elements, the buffer {}", tensor, segment->numel,
              values.size());
        gather_plane(*ranks_, session_.states(), static_cast<int>(param), plane, segment->offset,
                     values, "read_state " + tensor);
        return 0;
      }
      fail(ErrorCode::kUsage, "read_state: the model has no tensor '{}'", tensor);
    });
  }

  std::string save_checkpoint(const std::string& run_dir, const std::string& user_state, int keep,
                              SaveMode mode) {
    check(keep >= 1, ErrorCode::kUsage, "save_checkpoint: keep is {}; it must be at least 1", keep);
    check_usable();
    check_trains("save_checkpoint");
    // The save has collectives of its own beside those of steps: a rank that saves alone would wait
    // there for ranks that wait here for it.
    if (world_size() > 1) ranks_->barrier("save_checkpoint");
    if (mode == SaveMode::kWait) optimizer_.wait_idle();
    const TrainingState training{applied_steps_, scaler_.state(), config_.optimizer.decoupled,
                                 user_state};
    const std::filesystem::path folder =
        session_.save().start({{run_dir, static_cast<size_t>(keep)}, training, version_});
    if (mode == SaveMode::kWait) session_.save().wait();
    return folder.string();
  }

  void wait_for_save() {
    owner_.check_this("engine");
    session_.save().wait();
  }

  std::string load_checkpoint(const std::string& step_dir) {
    session_.save().wait();
    optimizer_.wait_idle();
    return changing([&] {
      const auto flavour =
          config_.evaluate_only ? std::nullopt : std::optional(config_.optimizer.decoupled);
      const TrainingState training =
          load_training(step_dir, layout(), session_.states(), *ranks_, flavour);
      scaler_.restore(training.scaler);
      applied_steps_ = training.steps;
      return training.user_state;
    });
  }

  void export_hf(const std::string& out_dir, size_t max_shard_bytes) {
    reading([&] {
      export_weights(model_dir_, out_dir, layout(), session_.states(), max_shard_bytes, *ranks_);
      return 0;
    });
  }

  Stats stats() const {
    Stats stats;
    stats.steps = applied_steps_;
    stats.skipped_steps = scaler_.state().skipped_steps;
    stats.uploaded_bytes = session_.executor().uploaded_bytes();
    stats.offloaded_bytes = session_.executor().offloaded_bytes();
    stats.device_peak_bytes = session_.planning().report.device_peak_bytes;
    stats.host_bytes = session_.host_bytes();
    stats.optimizer_seconds = optimizer_.busy_seconds();
    stats.optimizer_exposed_seconds = exposed_seconds_;
    stats.swap_wait_seconds = optimizer_.swap_wait_seconds();
    const DriveWear::Counts moved = wear_.counts();
    stats.nvme_read_bytes = moved.read;
    stats.nvme_written_bytes = moved.written;
    stats.nvme_written_today_bytes = moved.written_today;
    stats.save_held_seconds = optimizer_.held_seconds();
    return stats;
  }

  Tracer& tracer() { return tracer_; }

 private:
  const ModelLayout& layout() const { return session_.layout(); }

  // After the space for swapping was taken.
  void check_room_for_checkpoint() {
    const std::string& folder = config_.checkpoint_dir;
    if (folder.empty() || config_.evaluate_only) return;
    on_all_ranks(*ranks_, "checkpoint, room", [&] {
      const uint64_t bytes = report().save_bytes * static_cast<uint64_t>(world_size());
      if (rank() == 0) check_room(folder, config_.checkpoint_room, bytes);
    });
  }

  static void check_room(const std::string& folder, int count, uint64_t bytes) {
    const uint64_t need = static_cast<uint64_t>(count) * bytes;
    const uint64_t free = nvme::free_disk_bytes({&folder, 1}) + leftover_bytes(folder);
    check(
        need <= free, ErrorCode::kDoesNotFit,
        "a checkpoint takes {} ({} B), and room is needed for {} more; '{}' has {} free: {} B are "
        "missing; free space, keep fewer, or choose another folder",
        format_bytes(bytes), bytes, count, folder, format_bytes(free), need - std::min(need, free));
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
    const WalkResult walk = session_.executor().walk(
        session_.train_plan(),
        {.batches = batches,
         .loss_scale = loss_scale,
         .max_grad_norm = static_cast<float>(config_.optimizer.max_grad_norm),
         .version = version_,
         .hyper = hyper,
         .save = session_.save().running(),
         .optimizer = &optimizer_});
    ++version_;
    if (session_.backend().info().is_host && session_.planning().threads <= kFewCores) {
      const auto wait_begin = std::chrono::steady_clock::now();
      optimizer_.wait_idle();
      exposed_seconds_ += seconds_since(wait_begin);
    }
    StepResult result;
    result.loss = walk.loss_sum / static_cast<double>(walk.labelled_tokens);
    result.grad_norm = walk.scalars.grad_norm;
    result.clip = static_cast<double>(walk.scalars.grad_scale) * static_cast<double>(loss_scale);
    result.learning_rate = hyper.lr;
    result.loss_scale = static_cast<double>(loss_scale);
    result.skipped = walk.scalars.skip != 0;
    result.tokens = walk.micro_batches * session_.input().shape.rows;
    result.labelled_tokens = walk.labelled_tokens;
    result.step = applied_steps_ + 1;
    // Without a norm to wait for, the blocks whose gradients are finite were updated: the step
    // counts.
    if (!result.skipped || !session_.input().updates_wait_for_norm) ++applied_steps_;
    if (result.skipped) {
      result.nonfinite = first_bad_text(walk.scalars);
      scaler_.step_nonfinite(result.nonfinite);
    } else {
      scaler_.step_finite();
    }
    result.seconds = seconds_since(begin);
    return result;
  }

  std::string first_bad_text(const StepScalars& scalars) const {
    if (scalars.nonfinite_param < 0) return "the gradient norm";
    const FlatParamLayout& flat =
        layout().flat_params[static_cast<size_t>(scalars.nonfinite_param)];
    const int rank = static_cast<int>(scalars.nonfinite_rank);
    const int64_t index =
        shard_range(flat.numel, rank, world_size()).begin + scalars.nonfinite_index;
    for (const Segment& segment : flat.segments) {
      if (index >= segment.offset && index < segment.offset + segment.numel) {
        return fmt::format("the gradient of '{}' ({}) at element {}", segment.name, flat.name,
                           index - segment.offset);
      }
    }
    return fmt::format("the gradient of {}", flat.name);
  }

  static double seconds_since(std::chrono::steady_clock::time_point begin) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

  // Throws, once, also the error of a save in the background, which harms nothing.
  void check_usable() {
    owner_.check_this("engine");
    check(failure_.empty(), ErrorCode::kInternal,
          "the engine failed before and refuses further work; resume from the last checkpoint. The "
          "first error was: {}",
          failure_);
    session_.save().check_finished();
  }

  void check_trains(const char* call) const {
    check(!config_.evaluate_only, ErrorCode::kUsage,
          "{}: the engine was opened to evaluate only (evaluate_only); it has no masters, moments "
          "or gradients",
          call);
  }

  // The other ranks must not wait for this one.
  void give_up(const char* reason) {
    failure_ = reason;
    ranks_->abort(reason);
  }

  // Work that changes states. After a failure that may have left them half changed, every further
  // call is refused; bad input is found before anything is issued and harms nothing.
  template <typename Work>
  auto changing(const Work& work) -> decltype(work()) {
    check_usable();
    try {
      return work();
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kUsage && error.code() != ErrorCode::kInvalidData) {
        give_up(error.what());
      }
      throw;
    } catch (const std::exception& error) {
      give_up(error.what());
      throw;
    }
  }

  // Work that reads states between steps: waits for the update; a failure, say of a disk, harms
  // nothing.
  template <typename Work>
  auto reading(const Work& work) -> decltype(work()) {
    check_usable();
    optimizer_.wait_idle();
    return work();
  }

  OwnerProcess owner_;
  std::shared_ptr<Communicator> ranks_;
  EngineConfig config_;
  std::string model_dir_;
  LocalRanks local_;
  // While this is made: its memory and its threads stay on the CPUs of this rank, the caller's
  // thread does not.
  std::optional<AffinityScope> affinity_;
  Tracer tracer_;
  Session session_;
  DriveWear wear_;
  LrSchedule schedule_;
  GradScaler scaler_;
  OptimizerQueue optimizer_;
  int64_t applied_steps_ = 0;
  uint32_t version_ = 0;
  double exposed_seconds_ = 0;
  std::string failure_;
};

Engine::Engine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Engine::~Engine() {
  if (!impl_->owner().is_this()) static_cast<void>(impl_.release());
}

std::unique_ptr<Engine> Engine::open(const std::string& model_dir, const EngineConfig& config) {
  const RunPart part = join_ranks(config.device);
  EngineConfig own = config;
  own.device = part.device;
  return open_engine(model_dir, own, part.ranks);
}

std::unique_ptr<Engine> open_engine(const std::string& model_dir, const EngineConfig& config,
                                    std::shared_ptr<Communicator> ranks) {
  return std::unique_ptr<Engine>(
      new Engine(std::make_unique<Engine::Impl>(model_dir, config, std::move(ranks))));
}

PlanReport Engine::plan(const std::string& model_dir, const EngineConfig& config, int ranks) {
  check(ranks >= 1, ErrorCode::kUsage, "a plan for {} ranks", ranks);
  const PlanningRanks planned{.world_size = ranks, .local = ranks, .ranks = nullptr};
  return make_planning(model_dir, config, planned, nullptr).report;
}

const PlanReport& Engine::plan() const { return impl_->report(); }
const EngineConfig& Engine::config() const { return impl_->config(); }
StepResult Engine::step(std::span<const MicroBatch> batches) { return impl_->step(batches); }
void Engine::synchronize() { impl_->synchronize(); }
EvalResult Engine::evaluate(std::span<const MicroBatch> batches) {
  return impl_->evaluate(batches);
}
int Engine::rank() const { return impl_->rank(); }
int Engine::world_size() const { return impl_->world_size(); }
int64_t Engine::steps_done() const { return impl_->steps_done(); }
std::vector<TensorDescription> Engine::tensors() const { return impl_->tensors(); }
void Engine::read_state(const std::string& tensor, StateKind kind, std::span<float> values) {
  impl_->read_state(tensor, kind, values);
}
std::string Engine::save_checkpoint(const std::string& run_dir, const std::string& user_state,
                                    int keep, SaveMode mode) {
  return impl_->save_checkpoint(run_dir, user_state, keep, mode);
}
void Engine::wait_for_save() { impl_->wait_for_save(); }
std::string Engine::load_checkpoint(const std::string& step_dir) {
  return impl_->load_checkpoint(step_dir);
}
std::string Engine::latest_checkpoint(const std::string& run_dir) {
  const std::vector<CheckpointEntry> complete = list_checkpoints(run_dir);
  return complete.empty() ? "" : complete.front().folder.string();
}
void Engine::export_hf(const std::string& out_dir, size_t max_shard_bytes) {
  impl_->export_hf(out_dir, max_shard_bytes);
}
Stats Engine::stats() const { return impl_->stats(); }
void Engine::start_trace() { impl_->tracer().start(); }
void Engine::write_trace(const std::string& path) {
  impl_->tracer().stop();
  impl_->tracer().write(path);
}

}  // namespace orlop

#include "optim/optimizer_queue.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/check.h"
#include "base/thread.h"

namespace orlop {
namespace {

constexpr size_t kWaitingBatches = 1024;

}  // namespace

OptimizerQueue::OptimizerQueue(std::vector<HostUpdate> updates, int threads, Tracer* tracer)
    : updates_(std::move(updates)),
      threads_(threads),
      tracer_(tracer),
      jobs_(2 * updates_.size() + kWaitingBatches) {
  for (const HostUpdate& update : updates_) {
    const auto param = static_cast<size_t>(update.param);
    update_of_.resize(std::max(update_of_.size(), param + 1));
    update_of_[param] = &update;
  }
  thread_ = start_thread("optimizer", [this] { run(); });
}

OptimizerQueue::~OptimizerQueue() {
  jobs_.close();
  thread_.join();
}

void OptimizerQueue::submit(const UpdateJob& job) {
  ORLOP_INVARIANT(job.batch || update_of_.at(static_cast<size_t>(job.param)) != nullptr);
  {
    std::lock_guard lock(mutex_);
    if (error_) std::rethrow_exception(error_);
    ++submitted_;
  }
  jobs_.push(job);
}

void OptimizerQueue::wait_idle() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return error_ || finished_ == submitted_; });
  if (error_) std::rethrow_exception(error_);
}

std::span<const HostUpdate> OptimizerQueue::updates_of(const UpdateJob& job) const {
  if (job.batch) return job.batch->updates;
  return {update_of_[static_cast<size_t>(job.param)], 1};
}

void OptimizerQueue::run() {
  bool failed = false;
  while (const std::optional<UpdateJob> job = jobs_.pop()) {
    std::exception_ptr error;
    try {
      if (!failed) run_job(*job);
    } catch (const Error& failure) {
      error = std::make_exception_ptr(Error(
          failure.code(), fmt::format("update of step {}: {}", job->hyper.step, failure.what())));
    } catch (...) {
      error = std::current_exception();
    }
    failed = failed || error;
    {
      std::lock_guard lock(mutex_);
      ++finished_;
      if (error) error_ = error;
    }
    changed_.notify_all();
    if (!failed) continue;
    for (const HostUpdate& update : updates_) open_gate(update.gate, Gate::kFailed);
    for (const HostUpdate& update : updates_of(*job)) open_gate(update.gate, Gate::kFailed);
  }
}

void OptimizerQueue::run_job(const UpdateJob& job) {
  for (Event* arrival : job.arrivals) {
    if (arrival != nullptr) arrival->synchronize();
  }
  await_save(job);
  for (const HostUpdate& update : updates_of(job)) {
    if (job.scalars->skip == 0) run_update(update, job);
    open_gate(update.gate, job.version);
  }
}

void OptimizerQueue::run_update(const HostUpdate& update, const UpdateJob& job) {
  if (update.prepare) update.prepare();
  const auto begin = Tracer::Clock::now();
  for (const UpdatePart& part : update.parts) {
    AdamHyper hyper = part.hyper.value_or(job.hyper);
    if (!part.decay) hyper.weight_decay = 0;
    hyper.seed = part.seed;
    adam_step(part.shard, hyper, job.scalars->grad_scale, threads_);
  }
  add_span("adam", update.param, begin, busy_ns_);
}

void OptimizerQueue::await_save(const UpdateJob& job) {
  if (job.saved_version == 0) return;
  const auto begin = Tracer::Clock::now();
  if (await_gate(job.saved, job.saved_version))
    add_span("wait for save", job.param, begin, held_ns_);
}

void OptimizerQueue::add_span(const char* what, int param, Tracer::Clock::time_point begin,
                              std::atomic<int64_t>& total) {
  const auto end = Tracer::Clock::now();
  total += std::chrono::duration_cast<std::chrono::nanoseconds>(end - begin).count();
  if (tracer_ == nullptr || !tracer_->enabled()) return;
  tracer_->add(tracer_->lane("optimizer"), fmt::format("{} {}", what, param), begin, end);
}

}  // namespace orlop

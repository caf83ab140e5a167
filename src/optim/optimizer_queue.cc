#include "optim/optimizer_queue.h"

#include <utility>

#include "base/check.h"
#include "base/thread.h"

namespace orlop {
namespace {

void open_gate(const Gate& gate, uint32_t version) {
  gate.value->store(version, std::memory_order_release);
  gate.value->notify_all();
}

}  // namespace

OptimizerQueue::OptimizerQueue(std::vector<HostUpdate> updates, int threads, Tracer* tracer)
    : updates_(std::move(updates)), threads_(threads), tracer_(tracer) {
  thread_ = start_thread("optimizer", [this] { run(); });
}

OptimizerQueue::~OptimizerQueue() {
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void OptimizerQueue::submit(const UpdateJob& job) {
  {
    std::lock_guard lock(mutex_);
    if (error_) std::rethrow_exception(error_);
    jobs_.push_back(job);
  }
  changed_.notify_all();
}

void OptimizerQueue::wait_idle() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return error_ || (jobs_.empty() && !running_); });
  if (error_) std::rethrow_exception(error_);
}

void OptimizerQueue::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return closed_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    const UpdateJob job = jobs_.front();
    jobs_.pop_front();
    running_ = true;
    lock.unlock();
    std::exception_ptr error;
    try {
      run_job(job);
    } catch (const Error& failure) {
      error = std::make_exception_ptr(Error(
          failure.code(), fmt::format("update of step {}: {}", job.engine_step, failure.what())));
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    running_ = false;
    if (error) {
      error_ = error;
      open_gates(updates_, Gate::kFailed);
      open_gates(updates_of(job), Gate::kFailed);
      for (const UpdateJob& dropped : jobs_) open_gates(updates_of(dropped), Gate::kFailed);
      jobs_.clear();
    }
    changed_.notify_all();
  }
}

void OptimizerQueue::run_job(const UpdateJob& job) {
  if (job.scalars.skip != 0) {
    open_gates(updates_of(job), job.version);
    return;
  }
  const bool traced = tracer_ != nullptr && tracer_->enabled();
  const int lane = traced ? tracer_->lane("optimizer") : 0;
  for (const HostUpdate& update : updates_of(job)) {
    if (update.prepare) update.prepare();
    const auto begin = Tracer::Clock::now();
    for (const UpdatePart& part : update.parts) {
      AdamHyper hyper = part.hyper.value_or(job.hyper);
      if (!part.decay) hyper.weight_decay = 0;
      hyper.seed = part.seed;
      adam_step(part.shard, hyper, job.scalars.grad_scale, threads_);
    }
    open_gate(update.gate, job.version);
    const auto end = Tracer::Clock::now();
    busy_ns_ += std::chrono::duration_cast<std::chrono::nanoseconds>(end - begin).count();
    if (traced) tracer_->add(lane, fmt::format("adam {}", update.param), begin, end);
  }
}

const std::vector<HostUpdate>& OptimizerQueue::updates_of(const UpdateJob& job) const {
  return job.updates ? *job.updates : updates_;
}

void OptimizerQueue::open_gates(const std::vector<HostUpdate>& updates, uint32_t version) {
  for (const HostUpdate& update : updates) open_gate(update.gate, version);
}

}  // namespace orlop

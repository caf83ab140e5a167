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

OptimizerQueue::OptimizerQueue(HostUpdates updates, int threads, Tracer* tracer)
    : updates_(std::move(updates)),
      threads_(threads),
      tracer_(tracer),
      transfers_(static_cast<size_t>(updates_.slots)) {
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

bool OptimizerQueue::is_idle() {
  std::lock_guard lock(mutex_);
  return jobs_.empty() && !running_;
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
      for (int slot = 0; slot < updates_.slots; ++slot) wait_slot(slot);
    } catch (const Error& failure) {
      error = std::make_exception_ptr(Error(
          failure.code(), fmt::format("update of step {}: {}", job.engine_step, failure.what())));
    } catch (...) {
      error = std::current_exception();
    }
    for (int slot = 0; error && slot < updates_.slots; ++slot) drain_slot(slot);
    lock.lock();
    running_ = false;
    if (error) {
      error_ = error;
      jobs_.clear();
      open_all_gates(Gate::kFailed);
    }
    changed_.notify_all();
  }
}

void OptimizerQueue::run_job(const UpdateJob& job) {
  if (job.scalars.skip != 0) {
    open_all_gates(job.version);
    return;
  }
  for (const UpdateOp& op : updates_.ops) {
    if (op.slot >= 0 && op.kind != UpdateOp::Kind::kSwapOut) {
      const auto begin = Tracer::Clock::now();
      wait_slot(op.slot);
      add_span("wait for a drive", op, begin, swap_wait_ns_);
    }
    if (op.kind == UpdateOp::Kind::kAdam) {
      run_adam(op, job);
    } else {
      start_transfers(op, job);
    }
    if (op.slot >= 0 && op.is_last) {
      (*updates_.versions)[static_cast<size_t>(op.param)] = job.version;
    }
    if (op.opens_gate) {
      open_gate(updates_.gate_of_param[static_cast<size_t>(op.param)], job.version);
    }
  }
}

void OptimizerQueue::run_adam(const UpdateOp& op, const UpdateJob& job) {
  const auto begin = Tracer::Clock::now();
  for (const UpdatePart& part : op.parts) {
    AdamHyper hyper = job.hyper;
    if (!part.decay) hyper.weight_decay = 0;
    hyper.seed = part.seed;
    adam_step(part.shard, hyper, job.scalars.grad_scale, threads_);
  }
  add_span("adam", op, begin, busy_ns_);
}

// A chunk is read as the update before left it, and written as this one leaves it.
void OptimizerQueue::start_transfers(const UpdateOp& op, const UpdateJob& job) {
  const bool reads = op.kind == UpdateOp::Kind::kSwapIn;
  const int64_t version =
      reads ? (*updates_.versions)[static_cast<size_t>(op.param)] : int64_t{job.version};
  for (const SwapPiece& piece : op.pieces) {
    Completion<> moved;
    const auto done = [moved](const std::exception_ptr& error) mutable {
      error ? moved.set_error(error) : moved.set_value();
    };
    const nvme::SwapRequest request{piece.key, version, 0};
    if (reads) {
      updates_.swapper->swap_in(request, piece.memory, done);
    } else {
      updates_.swapper->swap_out(request, piece.memory, done);
    }
    transfers_[static_cast<size_t>(op.slot)].push_back(moved);
  }
}

std::exception_ptr OptimizerQueue::drain_slot(int slot) noexcept {
  std::vector<Completion<>>& transfers = transfers_[static_cast<size_t>(slot)];
  std::exception_ptr error;
  for (const Completion<>& transfer : transfers) {
    const std::exception_ptr failure = transfer.wait_error();
    if (!error) error = failure;
  }
  transfers.clear();
  return error;
}

void OptimizerQueue::wait_slot(int slot) {
  if (const std::exception_ptr error = drain_slot(slot)) std::rethrow_exception(error);
}

void OptimizerQueue::add_span(const char* what, const UpdateOp& op, Tracer::Clock::time_point begin,
                              std::atomic<int64_t>& total) {
  const auto end = Tracer::Clock::now();
  total += std::chrono::duration_cast<std::chrono::nanoseconds>(end - begin).count();
  if (tracer_ == nullptr || !tracer_->enabled()) return;
  tracer_->add(tracer_->lane("optimizer"), fmt::format("{} {}", what, op.param), begin, end);
}

void OptimizerQueue::open_all_gates(uint32_t version) {
  for (const Gate& gate : updates_.gates) open_gate(gate, version);
}

}  // namespace orlop

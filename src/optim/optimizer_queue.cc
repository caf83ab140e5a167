#include "optim/optimizer_queue.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/check.h"
#include "base/thread.h"

namespace orlop {
namespace {

// Jobs that can wait: those of two steps, or batches of tensors.
size_t waiting_jobs(const HostUpdates& updates) {
  return updates.ops.empty() ? 1024 : 2 * updates.ops.size();
}

}  // namespace

OptimizerQueue::OptimizerQueue(HostUpdates updates, int threads, Tracer* tracer)
    : updates_(std::move(updates)),
      threads_(threads),
      tracer_(tracer),
      slots_(static_cast<size_t>(updates_.slots)),
      jobs_(waiting_jobs(updates_)) {
  thread_ = start_thread("optimizer", [this] { run(); });
}

OptimizerQueue::~OptimizerQueue() {
  jobs_.close();
  thread_.join();
}

void OptimizerQueue::submit(const UpdateJob& job) {
  {
    std::lock_guard lock(mutex_);
    if (error_) std::rethrow_exception(error_);
    ++submitted_;
  }
  jobs_.push(job);
}

void OptimizerQueue::wait_idle() {
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return error_ || finished_ == submitted_; });
    if (error_) std::rethrow_exception(error_);
  }
  if (updates_.swapper == nullptr) return;
  try {
    updates_.swapper->flush();
  } catch (...) {
    std::lock_guard lock(mutex_);
    error_ = std::current_exception();
    throw;
  }
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
    if (error) fail(error);
    {
      std::lock_guard lock(mutex_);
      ++finished_;
    }
    changed_.notify_all();
    if (!failed || job->batch == nullptr) continue;
    for (const HostUpdate& update : job->batch->updates) open_gate(update.gate, Gate::kFailed);
  }
}

// What is under way ends before anybody hears of the failure.
void OptimizerQueue::fail(std::exception_ptr error) {
  for (Slot& slot : slots_) {
    for (const Completion<>& transfer : slot.transfers) transfer.wait_error();
    slot.transfers.clear();
  }
  {
    std::lock_guard lock(mutex_);
    if (!error_) error_ = std::move(error);
  }
  for (const UpdateOp& op : updates_.ops) {
    if (op.is_last) open_gate(updates_.gates[static_cast<size_t>(op.param)], Gate::kFailed);
  }
}

void OptimizerQueue::run_job(const UpdateJob& job) {
  if (job.batch == nullptr) {
    const UpdateOp& op = updates_.ops[static_cast<size_t>(job.op)];
    return run_op(op, updates_.gates[static_cast<size_t>(op.param)], {}, job);
  }
  for (const HostUpdate& update : job.batch->updates) {
    run_op(update.op, update.gate, update.prepare, job);
  }
}

void OptimizerQueue::run_op(const UpdateOp& op, const Gate& gate,
                            const std::function<void()>& prepare, const UpdateJob& job) {
  if (op.slot >= 0 && op.kind != UpdateOp::Kind::kSwapOut) wait_slot(op);
  for (Event* arrival : job.arrivals) {
    if (arrival != nullptr) arrival->synchronize();
  }
  if (op.kind == UpdateOp::Kind::kAdam) {
    await_save(op, job);
    const bool skips = job.scalars->skip != 0;
    if (op.slot >= 0) slots_[static_cast<size_t>(op.slot)].is_unchanged = skips;
    if (!skips && prepare) prepare();
    if (!skips) run_adam(op.param, op.parts, job);
  } else {
    start_transfers(op, job);
  }
  if (op.is_last) open_gate(gate, job.version);
}

void OptimizerQueue::run_adam(int param, std::span<const UpdatePart> parts, const UpdateJob& job) {
  const auto begin = Tracer::Clock::now();
  for (const UpdatePart& part : parts) {
    AdamHyper hyper = part.hyper.value_or(job.hyper);
    if (!part.decay) hyper.weight_decay = 0;
    hyper.seed = part.seed;
    adam_step(part.shard, hyper, job.scalars->grad_scale, threads_);
  }
  add_span("adam", param, begin, busy_ns_);
}

// A chunk is read as the update before left it, and written as this one leaves it.
void OptimizerQueue::start_transfers(const UpdateOp& op, const UpdateJob& job) {
  Slot& slot = slots_[static_cast<size_t>(op.slot)];
  const bool reads = op.kind == UpdateOp::Kind::kSwapIn;
  if (!reads && slot.is_unchanged) return;
  const bool is_blank = reads && op.is_blank != nullptr && *op.is_blank;
  if (op.is_blank != nullptr) *op.is_blank = *op.is_blank && reads;
  int64_t& version = (*updates_.versions)[static_cast<size_t>(op.param)];
  for (const SwapPiece& piece : op.pieces) {
    if (is_blank && piece.swapper == nullptr) {
      std::ranges::fill(piece.memory, std::byte{0});
      continue;
    }
    nvme::Swapper& swapper = piece.swapper != nullptr ? *piece.swapper : *updates_.swapper;
    Completion<> moved;
    const auto done = [moved](const std::exception_ptr& error) mutable {
      error ? moved.set_error(error) : moved.set_value();
    };
    if (reads) {
      swapper.swap_in({piece.key, version, 0}, piece.memory, done);
    } else {
      swapper.swap_out({piece.key, job.version, 0}, piece.memory, done);
    }
    slot.transfers.push_back(moved);
  }
  if (op.is_last) version = job.version;
}

void OptimizerQueue::wait_slot(const UpdateOp& op) {
  std::vector<Completion<>>& transfers = slots_[static_cast<size_t>(op.slot)].transfers;
  if (transfers.empty()) return;
  const auto begin = Tracer::Clock::now();
  std::exception_ptr error;
  for (const Completion<>& transfer : transfers) {
    const std::exception_ptr failure = transfer.wait_error();
    if (!error) error = failure;
  }
  transfers.clear();
  add_span("wait for a drive", op.param, begin, swap_wait_ns_);
  if (error) std::rethrow_exception(error);
}

void OptimizerQueue::await_save(const UpdateOp& op, const UpdateJob& job) {
  if (job.saved_version == 0) return;
  const auto begin = Tracer::Clock::now();
  if (await_gate(job.saved, job.saved_version))
    add_span("wait for save", op.param, begin, held_ns_);
}

void OptimizerQueue::add_span(const char* what, int param, Tracer::Clock::time_point begin,
                              std::atomic<int64_t>& total) {
  const auto end = Tracer::Clock::now();
  total += std::chrono::duration_cast<std::chrono::nanoseconds>(end - begin).count();
  if (tracer_ == nullptr || !tracer_->enabled()) return;
  tracer_->add(tracer_->lane("optimizer"), fmt::format("{} {}", what, param), begin, end);
}

}  // namespace orlop

#include "nvme/io_loop.h"

#include <sys/stat.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <thread>

#include "base/bytes.h"
#include "base/check.h"
#include "base/log.h"

namespace orlop::nvme {
namespace {

constexpr auto kRetryPause = std::chrono::microseconds(100);

std::exception_ptr cancelled(const Transfer& transfer) {
  return std::make_exception_ptr(Error(
      ErrorCode::kIo, fmt::format("{}: cancelled before it was complete, because the engine is "
                                  "shutting down ({})",
                                  transfer.operation, transfer.path)));
}

// What the file system says about a failure: space when the disk is full, the file's length
// otherwise.
std::string file_facts(int fd, int error) {
  if (error == ENOSPC || error == EDQUOT) {
    struct statvfs space {};
    if (::fstatvfs(fd, &space) != 0) return "";
    return fmt::format("; {} are free", format_bytes(space.f_bavail * space.f_frsize));
  }
  struct stat file {};
  if (::fstat(fd, &file) != 0) return "";
  return fmt::format("; the file has {} bytes", file.st_size);
}

}  // namespace

IoLoop::IoLoop(std::unique_ptr<IoBackend> backend, IoQueueOptions options)
    : backend_(std::move(backend)),
      options_(options),
      blocks_(options.depth),
      results_(options.depth) {
  for (size_t i = blocks_.size(); i > 0; --i) free_blocks_.push_back(i - 1);
}

void IoLoop::submit(Transfer transfer) {
  bool wake = false;
  {
    std::unique_lock lock(mutex_);
    if (finished_) {
      lock.unlock();
      transfer.done(cancelled(transfer));
      return;
    }
    inbox_.push_back(std::move(transfer));
    wake = std::exchange(sleeping_, false);
  }
  if (wake) backend_->wake();
}

void IoLoop::with_backend(const std::function<void(IoBackend&)>& action) {
  Call call{&action, {}};
  bool wake = false;
  {
    std::lock_guard lock(mutex_);
    ORLOP_INVARIANT(!stopping_);
    calls_.push_back(&call);
    wake = std::exchange(sleeping_, false);
  }
  if (wake) backend_->wake();
  Completion<>(call.done).wait();
}

void IoLoop::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  backend_->wake();
}

bool IoLoop::wait_finished(std::chrono::milliseconds limit) {
  std::unique_lock lock(mutex_);
  return finished_changed_.wait_for(lock, limit, [this] { return finished_; });
}

IoQueueStats IoLoop::stats() const {
  return {bytes_read_.load(), bytes_written_.load(), requests_.load(), retries_.load()};
}

void IoLoop::run() {
  while (take_inbox()) {
    cut_blocks();
    offer();
    reap();
  }
}

// False when the loop has ended.
bool IoLoop::take_inbox() {
  std::vector<Call*> calls;
  {
    std::lock_guard lock(mutex_);
    sleeping_ = false;
    arrived_.swap(inbox_);
    calls.swap(calls_);
    cancelled_ = stopping_;
    if (stopping_ && arrived_.empty() && calls.empty() && waiting_.empty() && to_offer_.empty() &&
        in_backend_ == 0) {
      finished_ = true;
      finished_changed_.notify_all();
      return false;
    }
  }
  run_calls(calls);
  for (Transfer& transfer : arrived_) begin(std::move(transfer));
  arrived_.clear();
  if (cancelled_) cancel_waiting();
  return true;
}

void IoLoop::run_calls(const std::vector<Call*>& calls) {
  for (Call* call : calls) {
    Completion<> done = call->done;  // the call is gone once its owner has the outcome
    try {
      (*call->action)(*backend_);
      done.set_value();
    } catch (...) {
      done.set_error(std::current_exception());
    }
  }
}

void IoLoop::begin(Transfer transfer) {
  if (transfer.data.empty()) {
    transfer.done(nullptr);
    return;
  }
  auto active = std::make_shared<Active>();
  active->key = {transfer.priority, arrivals_++};
  active->transfer = std::move(transfer);
  waiting_.emplace(active->key, std::move(active));
}

// Transfers that have blocks out end when those come back.
void IoLoop::cancel_waiting() {
  for (auto& [key, active] : Waiting(std::move(waiting_))) {
    if (!active->error) active->error = cancelled(active->transfer);
    if (active->blocks_out == 0) active->transfer.done(active->error);
  }
  waiting_.clear();
}

void IoLoop::cut_blocks() {
  while (!free_blocks_.empty() && !waiting_.empty()) {
    const auto first = waiting_.begin();
    Active& active = *first->second;
    const size_t index = free_blocks_.back();
    free_blocks_.pop_back();
    Block& block = blocks_[index];
    block.active = first->second;
    block.begin = active.issued;
    block.bytes = std::min(options_.block_bytes, active.transfer.data.size() - active.issued);
    block.stuck_since = {};
    active.issued += block.bytes;
    ++active.blocks_out;
    to_offer_.push_back(index);
    if (active.issued == active.transfer.data.size()) waiting_.erase(first);
  }
}

void IoLoop::offer() {
  // A failed transfer starts nothing more.
  std::vector<size_t> dropped;
  std::erase_if(to_offer_, [&](size_t index) {
    if (!blocks_[index].active->error) return false;
    dropped.push_back(index);
    return true;
  });
  for (const size_t index : dropped) release(index);
  if (to_offer_.empty()) return;

  offered_.clear();
  for (const size_t index : to_offer_) offered_.push_back(request_of(index));
  const size_t accepted = std::min(backend_->submit(offered_), offered_.size());
  const size_t front = to_offer_.front();
  to_offer_.erase(to_offer_.begin(), to_offer_.begin() + static_cast<ptrdiff_t>(accepted));
  in_backend_ += accepted;
  requests_.fetch_add(accepted, std::memory_order_relaxed);
  if (accepted == 0 && in_backend_ == 0) {
    to_offer_.erase(to_offer_.begin());
    moved_ = false;
    retry(front, EAGAIN);
  }
}

IoRequest IoLoop::request_of(size_t index) const {
  const Block& block = blocks_[index];
  const Transfer& transfer = block.active->transfer;
  return {transfer.op,
          transfer.fd,
          transfer.offset + block.begin,
          transfer.data.data() + block.begin,
          block.bytes,
          uint64_t{block.generation} << 32 | index};
}

void IoLoop::reap() {
  if (!moved_) std::this_thread::sleep_for(kRetryPause);
  moved_ = true;
  bool wait = in_backend_ > 0 || to_offer_.empty();
  if (wait) {
    std::lock_guard lock(mutex_);
    wait = inbox_.empty() && calls_.empty() && (!stopping_ || in_backend_ > 0);
    sleeping_ = wait;
  }
  const size_t count = backend_->reap(results_, wait);
  if (count > 0) moved_ = false;
  for (size_t i = 0; i < count; ++i) complete(results_[i]);
}

// Every result of every request, in any backend, ends here.
void IoLoop::complete(const IoResult& result) {
  const auto index = static_cast<size_t>(result.token & 0xffffffffu);
  const auto generation = static_cast<uint32_t>(result.token >> 32);
  if (index >= blocks_.size() || !blocks_[index].active ||
      blocks_[index].generation != generation) {
    log_line(LogLevel::kError, "io: a result that belongs to no request was dropped");
    return;
  }
  --in_backend_;
  Block& block = blocks_[index];
  ++block.generation;
  if (block.active->error) {
    release(index);
  } else if (result.result > 0) {
    progress(index, std::min(static_cast<size_t>(result.result), block.bytes));
  } else if (result.result == -EINTR || result.result == -EAGAIN) {
    retry(index, static_cast<int>(-result.result));
  } else {
    fail(index, describe(block, static_cast<int>(-result.result)));
  }
}

// Direct I/O needs the rest of a short transfer to start at a multiple of the alignment, so up to
// that many bytes are moved twice.
void IoLoop::progress(size_t index, size_t moved) {
  Block& block = blocks_[index];
  const Transfer& transfer = block.active->transfer;
  if (moved < block.bytes) moved = moved / transfer.alignment * transfer.alignment;
  if (moved == 0) return retry(index, EAGAIN);
  moved_ = true;
  block.stuck_since = {};
  block.begin += moved;
  block.bytes -= moved;
  (transfer.op == IoOp::kRead ? bytes_read_ : bytes_written_)
      .fetch_add(moved, std::memory_order_relaxed);
  if (block.bytes == 0) {
    release(index);
  } else {
    retries_.fetch_add(1, std::memory_order_relaxed);
    to_offer_.push_back(index);
  }
}

void IoLoop::retry(size_t index, int error) {
  Block& block = blocks_[index];
  const Clock::time_point now = Clock::now();
  if (block.stuck_since == Clock::time_point{}) block.stuck_since = now;
  if (now - block.stuck_since > options_.retry_limit) return fail(index, describe(block, error));
  retries_.fetch_add(1, std::memory_order_relaxed);
  to_offer_.push_back(index);
}

void IoLoop::fail(size_t index, std::exception_ptr error) {
  Active& active = *blocks_[index].active;
  moved_ = true;
  active.error = std::move(error);
  waiting_.erase(active.key);
  release(index);
}

std::exception_ptr IoLoop::describe(const Block& block, int error) const {
  const Transfer& transfer = block.active->transfer;
  const bool read = transfer.op == IoOp::kRead;
  std::string why;
  if (error == EAGAIN || error == EINTR) {
    why = fmt::format("made no progress for {} ms: {}", options_.retry_limit.count(),
                      errno_text(error));
  } else if (error == 0) {
    why = read ? "met the end of the file" : "wrote nothing";
  } else {
    why = fmt::format("failed: {} (errno {})", errno_text(error), error);
  }
  return std::make_exception_ptr(
      Error(ErrorCode::kIo,
            fmt::format("{}: {} of {} bytes at offset {} of {} {}{}", transfer.operation,
                        read ? "read" : "write", block.bytes, transfer.offset + block.begin,
                        transfer.path, why, file_facts(transfer.fd, error))));
}

// Gives the block back and ends its transfer when it was the last.
void IoLoop::release(size_t index) {
  const std::shared_ptr<Active> active = std::move(blocks_[index].active);
  free_blocks_.push_back(index);
  --active->blocks_out;
  const bool all_cut = active->issued == active->transfer.data.size();
  if (active->blocks_out > 0 || (!active->error && !all_cut)) return;
  active->transfer.done(active->error);
}

}  // namespace orlop::nvme

#include "engine/swap_lane.h"

#include <optional>
#include <utility>

#include "base/check.h"
#include "base/thread.h"

namespace orlop {
namespace {

// Compute waits for these; the states that are swapped for an update go after them.
constexpr int64_t kUrgent = -1;
// Operations, as far as the main thread may run ahead of them.
constexpr size_t kMostWaiting = 1024;

std::exception_ptr with_name(const std::exception_ptr& error, const std::string& what) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& inner) {
    return std::make_exception_ptr(Error(inner.code(), fmt::format("{}: {}", what, inner.what())));
  } catch (...) {
    return std::current_exception();
  }
}

}  // namespace

SwapLane::SwapLane(const char* name, nvme::Swapper& swapper, std::vector<Gate> updated,
                   const std::vector<int64_t>& versions, Gate ended)
    : swapper_(swapper),
      updated_(std::move(updated)),
      versions_(versions),
      ended_(ended),
      items_(kMostWaiting) {
  thread_ = start_thread(name, [this] { run(); });
}

SwapLane::~SwapLane() {
  items_.close();
  thread_.join();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return last_ended_ == issued_; });
}

// The parts of an operation are its pieces and, so that none ends before all have started, itself.
uint32_t SwapLane::issue(const Swap& swap, const Turn& turn) {
  Item item{&swap, turn, 0};
  {
    std::lock_guard lock(mutex_);
    item.ticket = ++issued_;
    parts_left_.push_back(swap.pieces.size() + 1);
  }
  items_.push(item);
  return item.ticket;
}

void SwapLane::wait_ended() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return last_ended_ == issued_; });
}

void SwapLane::rethrow() {
  std::lock_guard lock(mutex_);
  if (error_) std::rethrow_exception(error_);
}

void SwapLane::run() {
  while (const std::optional<Item> item = items_.pop()) start(*item);
}

// False when something that it waited for has failed, which is told by whoever failed.
bool SwapLane::await_all(const Item& item) const {
  for (Event* event : item.swap->after) event->synchronize();
  const auto await = [](const Gate& gate, uint32_t version) {
    await_gate(gate, version);
    return gate.value->load() != Gate::kFailed;
  };
  if (item.swap->after_other >= 0 && !await(item.turn.other->ended(), item.turn.other_ticket))
    return false;
  const auto await_update = [&](int param, uint32_t version) {
    return param < 0 || !item.turn.updates || await(updated_[static_cast<size_t>(param)], version);
  };
  return await_update(item.swap->after_update_before, item.turn.version) &&
         await_update(item.swap->after_update, item.turn.version + 1);
}

// Every part ends exactly once, whatever happens.
void SwapLane::start(const Item& item) {
  const std::vector<SwapPiece>& pieces = item.swap->pieces;
  size_t started = 0;
  try {
    if (!await_all(item)) fail(nullptr);
    const bool skips = item.turn.skips || has_failed();
    for (; !skips && started < pieces.size(); ++started) start_piece(item, pieces[started]);
  } catch (...) {
    fail(with_name(std::current_exception(), item.swap->what));
  }
  for (; started < pieces.size() + 1; ++started) end_part(item.ticket);
}

void SwapLane::start_piece(const Item& item, const SwapPiece& piece) {
  const Swap& swap = *item.swap;
  const int64_t version =
      swap.param >= 0 ? versions_[static_cast<size_t>(swap.param)] : item.turn.version;
  const nvme::SwapRequest request{piece.key, version, kUrgent};
  const auto done = [this, &swap, ticket = item.ticket](const std::exception_ptr& error) {
    if (error) fail(with_name(error, swap.what));
    end_part(ticket);
  };
  if (swap.op == nvme::IoOp::kRead) {
    swapper_.swap_in(request, piece.memory, done);
  } else {
    swapper_.swap_out(request, piece.memory, done);
  }
}

bool SwapLane::has_failed() {
  std::lock_guard lock(mutex_);
  return failed_;
}

void SwapLane::fail(std::exception_ptr error) {
  std::lock_guard lock(mutex_);
  if (!failed_) error_ = std::move(error);
  failed_ = true;
}

void SwapLane::end_part(uint32_t ticket) {
  std::lock_guard lock(mutex_);
  --parts_left_[ticket - last_ended_ - 1];
  const uint32_t before = last_ended_;
  while (!parts_left_.empty() && parts_left_.front() == 0) {
    parts_left_.pop_front();
    ++last_ended_;
  }
  if (last_ended_ == before && !failed_) return;
  open_gate(ended_, failed_ ? Gate::kFailed : last_ended_);
  changed_.notify_all();
}

}  // namespace orlop

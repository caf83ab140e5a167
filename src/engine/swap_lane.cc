#include "engine/swap_lane.h"

#include <optional>
#include <utility>

#include "base/check.h"
#include "base/thread.h"

namespace orlop {
namespace {

// Compute waits for these; the states that are swapped for an update go after them.
constexpr int64_t kUrgent = -1;

}  // namespace

SwapLane::SwapLane(nvme::Swapper& swapper, std::vector<Gate> updated,
                   const std::vector<int64_t>& versions, Gate ended, size_t capacity)
    : swapper_(swapper),
      updated_(std::move(updated)),
      versions_(versions),
      ended_(ended),
      items_(capacity),
      pieces_left_(capacity) {
  thread_ = start_thread("swap", [this] { run(); });
}

SwapLane::~SwapLane() {
  items_.close();
  thread_.join();
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return last_ended_ == issued_; });
}

uint32_t SwapLane::issue(const SwapIn& swap_in, uint32_t version, bool updates) {
  Item item{&swap_in, version, updates, 0};
  {
    std::lock_guard lock(mutex_);
    item.ticket = ++issued_;
    pieces_left_[item.ticket % pieces_left_.size()] = swap_in.pieces.size();
  }
  items_.push(item);
  return item.ticket;
}

void SwapLane::drain() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return last_ended_ == issued_; });
  if (error_) std::rethrow_exception(error_);
}

void SwapLane::run() {
  while (const std::optional<Item> item = items_.pop()) start(*item);
}

// False when an update has failed.
bool SwapLane::await_updates(const Item& item) const {
  if (!item.updates) return true;
  const auto await = [&](int param, uint32_t version) {
    if (param < 0) return true;
    const Gate& gate = updated_[static_cast<size_t>(param)];
    await_gate(gate, version);
    return gate.value->load() != Gate::kFailed;
  };
  return await(item.swap_in->after_update_before, item.version) &&
         await(item.swap_in->after_update, item.version + 1);
}

// Every piece ends exactly once, whatever happens.
void SwapLane::start(const Item& item) {
  size_t started = 0;
  const std::vector<SwapPiece>& pieces = item.swap_in->pieces;
  try {
    for (Event* event : item.swap_in->after) event->synchronize();
    const size_t param = static_cast<size_t>(item.swap_in->param);
    if (!await_updates(item)) fail(nullptr);
    bool skipped = false;
    {
      std::lock_guard lock(mutex_);
      skipped = failed_;
    }
    for (; !skipped && started < pieces.size(); ++started) {
      swapper_.swap_in({pieces[started].key, versions_[param], kUrgent}, pieces[started].memory,
                       [this, ticket = item.ticket](const std::exception_ptr& error) {
                         if (error) fail(error);
                         end_piece(ticket);
                       });
    }
  } catch (...) {
    fail(std::current_exception());
  }
  for (; started < pieces.size(); ++started) end_piece(item.ticket);
}

void SwapLane::fail(std::exception_ptr error) {
  std::lock_guard lock(mutex_);
  if (!failed_) error_ = std::move(error);
  failed_ = true;
}

void SwapLane::end_piece(uint32_t ticket) {
  std::lock_guard lock(mutex_);
  --pieces_left_[ticket % pieces_left_.size()];
  const uint32_t before = last_ended_;
  while (last_ended_ != issued_ && pieces_left_[(last_ended_ + 1) % pieces_left_.size()] == 0) {
    ++last_ended_;
  }
  if (last_ended_ == before && !failed_) return;
  open_gate(ended_, failed_ ? Gate::kFailed : last_ended_);
  changed_.notify_all();
}

}  // namespace orlop

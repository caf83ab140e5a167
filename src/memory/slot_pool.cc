#include "memory/slot_pool.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <vector>

#include "base/check.h"

namespace orlop {

struct SlotPool::State {
  std::string name;
  std::span<std::byte> memory;
  size_t slot_bytes = 0;
  size_t slot_count = 0;

  mutable std::mutex mutex;
  std::condition_variable returned;
  std::vector<size_t> free;  // the slot returned last is lent first: it is warm
  size_t peak = 0;
  std::exception_ptr error;
  std::function<void(size_t)> observer;

  size_t in_use() const { return slot_count - free.size(); }

  // Takes a free slot; the lock is held.
  size_t take() {
    const size_t index = free.back();
    free.pop_back();
    peak = std::max(peak, in_use());
    if (observer) observer(in_use());
    return index;
  }

  void put_back(size_t index) {
    {
      std::lock_guard lock(mutex);
      free.push_back(index);
      if (observer) observer(in_use());
    }
    returned.notify_one();
  }

  std::span<std::byte> slot(size_t index) const {
    return memory.subspan(index * slot_bytes, slot_bytes);
  }
};

SlotPool::SlotPool(std::string name, std::span<std::byte> memory, size_t slot_bytes)
    : state_(std::make_shared<State>()) {
  check(slot_bytes > 0 && slot_bytes <= memory.size(), ErrorCode::kDoesNotFit,
        "slot pool '{}': {} bytes hold no slot of {} bytes", name, memory.size(), slot_bytes);
  state_->name = std::move(name);
  state_->memory = memory;
  state_->slot_bytes = slot_bytes;
  state_->slot_count = memory.size() / slot_bytes;
  state_->free.reserve(state_->slot_count);
  for (size_t index = state_->slot_count; index-- > 0;) state_->free.push_back(index);
}

SlotPool::~SlotPool() {
  close(std::make_exception_ptr(
      Error(ErrorCode::kInternal, fmt::format("slot pool '{}' was destroyed", state_->name))));
}

SlotLease SlotPool::acquire() {
  std::unique_lock lock(state_->mutex);
  state_->returned.wait(lock, [this] { return state_->error || !state_->free.empty(); });
  if (state_->error) std::rethrow_exception(state_->error);
  const size_t index = state_->take();
  return SlotLease(state_, state_->slot(index), index);
}

std::optional<SlotLease> SlotPool::try_acquire() {
  std::lock_guard lock(state_->mutex);
  if (state_->error) std::rethrow_exception(state_->error);
  if (state_->free.empty()) return std::nullopt;
  const size_t index = state_->take();
  return SlotLease(state_, state_->slot(index), index);
}

void SlotPool::close(std::exception_ptr error) {
  ORLOP_INVARIANT(error != nullptr);
  {
    std::lock_guard lock(state_->mutex);
    if (!state_->error) state_->error = std::move(error);
  }
  state_->returned.notify_all();
}

size_t SlotPool::slot_bytes() const { return state_->slot_bytes; }

size_t SlotPool::slot_count() const { return state_->slot_count; }

size_t SlotPool::in_use() const {
  std::lock_guard lock(state_->mutex);
  return state_->in_use();
}

size_t SlotPool::peak_in_use() const {
  std::lock_guard lock(state_->mutex);
  return state_->peak;
}

void SlotPool::set_observer(std::function<void(size_t)> observer) {
  std::lock_guard lock(state_->mutex);
  state_->observer = std::move(observer);
}

SlotLease& SlotLease::operator=(SlotLease&& other) noexcept {
  if (this != &other) {
    release();
    pool_ = std::move(other.pool_);
    memory_ = std::exchange(other.memory_, {});
    index_ = std::exchange(other.index_, 0);
  }
  return *this;
}

void SlotLease::release() noexcept {
  if (const auto pool = std::exchange(pool_, nullptr)) pool->put_back(index_);
  memory_ = {};
}

}  // namespace orlop

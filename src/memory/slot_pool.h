#pragma once

#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

namespace orlop {

class SlotLease;

// Equal slots in memory that was taken once. Acquiring from an empty pool waits, which is the
// back-pressure between stages. Thread-safe. A lease may outlive the pool, but not the memory.
class SlotPool {
 public:
  // As many slots of `slot_bytes` as `memory` holds, at least one; slots start at multiples of
  // `slot_bytes` from the start of `memory`. `name` appears in errors.
  SlotPool(std::string name, std::span<std::byte> memory, size_t slot_bytes);
  ~SlotPool();
  SlotPool(const SlotPool&) = delete;
  SlotPool& operator=(const SlotPool&) = delete;

  // Waits for a free slot. Throws the pool's error once it is closed.
  SlotLease acquire();
  // Empty when no slot is free. Throws the pool's error once it is closed.
  std::optional<SlotLease> try_acquire();

  // Ends the pool: every waiter and every later acquire throws `error`. Leases that are out stay
  // valid. The first error stays.
  void close(std::exception_ptr error);

  size_t slot_bytes() const;
  size_t slot_count() const;
  size_t in_use() const;
  size_t peak_in_use() const;

  // Called with the number of slots in use after every acquire and return, under the pool's lock:
  // it must not call the pool. Null removes it.
  void set_observer(std::function<void(size_t in_use)> observer);

 private:
  friend class SlotLease;
  struct State;
  std::shared_ptr<State> state_;
};

// The right to use one slot until the lease is destroyed or released. Move-only.
class SlotLease {
 public:
  SlotLease() = default;
  SlotLease(SlotLease&& other) noexcept { *this = std::move(other); }
  SlotLease& operator=(SlotLease&& other) noexcept;
  ~SlotLease() { release(); }

  std::byte* data() const { return memory_.data(); }
  std::span<std::byte> span() const { return memory_; }
  // Position of the slot in its pool, from 0.
  size_t index() const { return index_; }
  explicit operator bool() const { return pool_ != nullptr; }

  // Returns the slot now; the lease is empty afterwards.
  void release() noexcept;

 private:
  friend class SlotPool;
  SlotLease(std::shared_ptr<SlotPool::State> pool, std::span<std::byte> memory, size_t index)
      : pool_(std::move(pool)), memory_(memory), index_(index) {}

  std::shared_ptr<SlotPool::State> pool_;
  std::span<std::byte> memory_;
  size_t index_ = 0;
};

}  // namespace orlop

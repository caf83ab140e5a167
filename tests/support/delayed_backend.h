#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

#include "backend/backend.h"
#include "memory/host_arena.h"

namespace orlop::test {

// A backend whose queues fall behind each other at random. Whoever takes a queue finds, in one of
// three cases, a wait at its end: for a clock in pinned memory that ticks 50 to 250 microseconds
// apart, up to three ticks ahead. What is issued then runs that much later than work of other
// queues that does not wait for it.
class DelayedBackend final : public Backend {
 public:
  DelayedBackend(std::unique_ptr<Backend> inner, uint64_t seed);
  ~DelayedBackend() override;

  DeviceInfo info() const override { return inner_->info(); }
  Queue& queue(QueueKind kind) override;
  std::unique_ptr<Event> make_event() override { return inner_->make_event(); }
  Ops& ops() override { return inner_->ops(); }
  void* allocate_arena(size_t bytes) override { return inner_->allocate_arena(bytes); }
  void register_host_memory(void* address, size_t bytes) override {
    inner_->register_host_memory(address, bytes);
  }
  void synchronize() override { inner_->synchronize(); }

 private:
  void tick(uint64_t seed);

  HostArena page_;  // holds the clock; outlives the backend, which has it registered
  Gate clock_;
  std::unique_ptr<Backend> inner_;
  std::mutex mutex_;  // queues are taken by the engine's thread and by that of its saves
  std::mt19937_64 random_;
  std::atomic<bool> ends_{false};
  std::thread thread_;
};

// While it lives, every engine that is opened has such queues, of seeds of its own.
class DelayedQueues {
 public:
  explicit DelayedQueues(uint64_t seed);
  ~DelayedQueues();
  DelayedQueues(const DelayedQueues&) = delete;
  DelayedQueues& operator=(const DelayedQueues&) = delete;
};

}  // namespace orlop::test

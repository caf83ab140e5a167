#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "nvme/io_backend.h"

namespace orlop::nvme {

// What happens to one request instead of, or after, the real one.
struct Fault {
  enum Kind {
    kNone,
    kError,  // not performed; the result is -error
    kShort,  // moves `bytes` rounded down to 4096 and reports `bytes`
    kFlip,   // performed; then bit 0 of byte `bytes` of the memory is flipped
  };
  Kind kind = kNone;
  int error = 0;
  size_t bytes = 0;
  std::chrono::microseconds delay{0};  // the result comes this much later

  static Fault none() { return {}; }
  static Fault fail(int error) { return {kError, error, 0, {}}; }
  static Fault cut(size_t bytes) { return {kShort, 0, bytes, {}}; }
  static Fault flip(size_t byte) { return {kFlip, 0, byte, {}}; }
  static Fault late(std::chrono::microseconds delay) { return {kNone, 0, 0, delay}; }
};

// Called on the thread `io` for every request; `nth` counts from 0.
using FaultPlan = std::function<Fault(const IoRequest& request, uint64_t nth)>;

// Decorates a backend with faults. Results of delayed requests overtake each other.
class FaultyBackend final : public IoBackend {
 public:
  FaultyBackend(std::unique_ptr<IoBackend> inner, FaultPlan plan);

  // How many requests each submit() takes: called with what is offered. By default all.
  void limit_submissions(std::function<size_t(size_t offered)> limit) { limit_ = std::move(limit); }

  std::string_view name() const override { return inner_->name(); }
  size_t submit(std::span<const IoRequest> requests) override;
  size_t reap(std::span<IoResult> results, bool wait) override;
  void wake() noexcept override;
  void register_file(int fd) override { inner_->register_file(fd); }
  void unregister_file(int fd) override { inner_->unregister_file(fd); }
  void register_buffer(std::span<std::byte> region, size_t stride) override {
    inner_->register_buffer(region, stride);
  }
  void unregister_buffer(std::span<std::byte> region) override {
    inner_->unregister_buffer(region);
  }

 private:
  using Clock = std::chrono::steady_clock;
  struct Pending {
    IoRequest request;
    Fault fault;
  };
  struct Held {
    IoResult result;
    Clock::time_point due;
  };

  void hold(const Pending& pending, int64_t result);

  const std::unique_ptr<IoBackend> inner_;
  const FaultPlan plan_;
  std::function<size_t(size_t)> limit_;
  uint64_t count_ = 0;
  std::vector<Pending> pending_;  // with the inner backend
  std::vector<Held> held_;        // finished, not yet due
  std::atomic<bool> woken_{false};
};

// While it lives, every drive of a new engine or optimizer has these faults.
class Faults {
 public:
  explicit Faults(FaultPlan plan) {
    decorate_io_backends([plan = std::move(plan)](std::unique_ptr<IoBackend> backend) {
      return std::make_unique<FaultyBackend>(std::move(backend), plan);
    });
  }
  ~Faults() { decorate_io_backends(nullptr); }
};

}  // namespace orlop::nvme

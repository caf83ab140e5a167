#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace orlop {

// Records spans on named lanes (one per queue and per thread) and writes them as Chrome trace JSON,
// which Perfetto opens. Thread-safe. While it is off a span costs one relaxed load.
class Tracer {
 public:
  using Clock = std::chrono::steady_clock;

  // Forgets what was recorded before; nothing new while it is on.
  void start();
  void stop() { enabled_.store(false, std::memory_order_relaxed); }
  bool enabled() const { return enabled_.load(std::memory_order_relaxed); }

  // Index of the lane `name`, made on first use.
  int lane(std::string_view name);
  void add(int lane, std::string_view name, Clock::time_point begin, Clock::time_point end);

  // Writes all spans so far; times count from "originUs" of "otherData", which is the machine's
  // monotonic clock in microseconds, so that the traces of its ranks can be laid over each other.
  // Throws Error(kIo).
  void write(const std::string& path) const;

 private:
  struct Span {
    int lane;
    std::string name;
    int64_t begin_ns;
    int64_t duration_ns;
  };

  std::atomic<bool> enabled_{false};
  Clock::time_point origin_{};
  mutable std::mutex mutex_;
  std::vector<std::string> lanes_;
  std::vector<Span> spans_;
};

}  // namespace orlop

#pragma once

#include <cuda_runtime_api.h>

#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/trace.h"
#include "gpu/cuda_event.h"
#include "gpu/cuda_stream.h"

namespace orlop {

// A moment that is known on both clocks, the device's and the host's.
struct ClockAnchor {
  CudaEventHandle event{cudaEventDefault};
  Tracer::Clock::time_point host_time;
};

// Hands out anchors of one device, each good for about a second: the device's times are floats of
// milliseconds since the anchor. Thread-safe.
class DeviceClock {
 public:
  std::shared_ptr<const ClockAnchor> anchor();

 private:
  CudaStream stream_{0};  // always idle, so that an anchor is taken at once
  std::mutex mutex_;
  std::shared_ptr<const ClockAnchor> anchor_;
};

// Marks the work of one queue: an NVTX range around the issuing call, and, while the tracer is on,
// a span of the device's own times on the queue's lane. Used by one thread at a time.
class QueueTrace {
 public:
  // Without a tracer only NVTX ranges are made.
  QueueTrace(Tracer* tracer, DeviceClock* clock, const std::string& lane, cudaStream_t stream);

  // Covers the work issued between construction and destruction.
  class Span {
   public:
    Span(QueueTrace& trace, const char* name);
    Span(const Span&) = delete;
    Span& operator=(const Span&) = delete;
    ~Span();

   private:
    QueueTrace& trace_;
    const char* name_;
    std::shared_ptr<const ClockAnchor> anchor_;  // null: not traced
    size_t begin_ = 0;                           // index of an event
  };

  // Gives the tracer the spans whose work has run. Called after a synchronize() and now and then.
  void collect();

 private:
  struct Pending {
    const char* name;
    size_t begin;
    size_t end;
    std::shared_ptr<const ClockAnchor> anchor;
  };

  size_t take_event();
  bool give_to_tracer(const Pending& pending);

  Tracer* tracer_;
  DeviceClock* clock_;
  cudaStream_t stream_;
  int lane_ = 0;
  std::vector<CudaEventHandle> events_;  // grows while tracing
  std::vector<size_t> free_events_;
  std::deque<Pending> pending_;  // in the order of the stream
};

}  // namespace orlop

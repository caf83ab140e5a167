#include "gpu/nvtx_trace.h"

#include <nvtx3/nvToolsExt.h>

#include <chrono>

namespace orlop {
namespace {

constexpr auto kAnchorLifetime = std::chrono::seconds(1);
// Spans that may wait for their work before the queue looks for finished ones.
constexpr size_t kCollectThreshold = 512;

}  // namespace

std::shared_ptr<const ClockAnchor> DeviceClock::anchor() {
  const std::lock_guard lock(mutex_);
  if (anchor_ != nullptr && Tracer::Clock::now() - anchor_->host_time < kAnchorLifetime) {
    return anchor_;
  }
  auto fresh = std::make_shared<ClockAnchor>();
  ORLOP_CUDA(cudaEventRecord(fresh->event.get(), stream_.get()));
  ORLOP_CUDA(cudaEventSynchronize(fresh->event.get()));
  fresh->host_time = Tracer::Clock::now();
  anchor_ = fresh;
  return anchor_;
}

QueueTrace::QueueTrace(Tracer* tracer, DeviceClock* clock, const std::string& lane,
                       cudaStream_t stream)
    : tracer_(tracer), clock_(clock), stream_(stream) {
  if (tracer_ != nullptr) lane_ = tracer_->lane(lane);
}

QueueTrace::Span::Span(QueueTrace& trace, const char* name) : trace_(trace), name_(name) {
  if (trace_.tracer_ != nullptr && trace_.tracer_->enabled()) {
    if (trace_.pending_.size() >= kCollectThreshold) trace_.collect();
    auto anchor = trace_.clock_->anchor();
    begin_ = trace_.take_event();
    ORLOP_CUDA(cudaEventRecord(trace_.events_[begin_].get(), trace_.stream_));
    anchor_ = std::move(anchor);
  }
  nvtxRangePushA(name);
}

QueueTrace::Span::~Span() {
  nvtxRangePop();
  if (anchor_ == nullptr) return;
  try {
    const size_t end = trace_.take_event();
    ORLOP_CUDA(cudaEventRecord(trace_.events_[end].get(), trace_.stream_));
    trace_.pending_.push_back({name_, begin_, end, std::move(anchor_)});
  } catch (const std::exception&) {
    // The span is lost; the queue's next call reports what the device has.
  }
}

size_t QueueTrace::take_event() {
  if (free_events_.empty()) {
    events_.emplace_back(cudaEventDefault);
    return events_.size() - 1;
  }
  const size_t index = free_events_.back();
  free_events_.pop_back();
  return index;
}

bool QueueTrace::give_to_tracer(const Pending& pending) {
  const cudaEvent_t end = events_[pending.end].get();
  const cudaError_t state = cudaEventQuery(end);
  if (state == cudaErrorNotReady) {
    static_cast<void>(cudaGetLastError());
    return false;
  }
  cuda_check(state, "cudaEventQuery", __FILE__, __LINE__);
  float begin_ms = 0;
  float end_ms = 0;
  const cudaEvent_t anchor = pending.anchor->event.get();
  ORLOP_CUDA(cudaEventElapsedTime(&begin_ms, anchor, events_[pending.begin].get()));
  ORLOP_CUDA(cudaEventElapsedTime(&end_ms, anchor, end));
  const auto host_time = [&](float ms) {
    return pending.anchor->host_time +
           std::chrono::nanoseconds(static_cast<int64_t>(static_cast<double>(ms) * 1e6));
  };
  tracer_->add(lane_, pending.name, host_time(begin_ms), host_time(end_ms));
  return true;
}

void QueueTrace::collect() {
  while (!pending_.empty() && give_to_tracer(pending_.front())) {
    free_events_.push_back(pending_.front().begin);
    free_events_.push_back(pending_.front().end);
    pending_.pop_front();
  }
}

}  // namespace orlop

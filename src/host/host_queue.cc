#include "host/host_queue.h"

#include <omp.h>

#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/thread.h"
#include "base/trace.h"

namespace orlop::host {

bool Progress::reached(uint64_t ticket) const {
  std::lock_guard lock(mutex_);
  return done_ >= ticket;
}

void Progress::await(uint64_t ticket) const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return done_ >= ticket; });
}

Progress::Failure Progress::failure_until(uint64_t ticket) const {
  std::lock_guard lock(mutex_);
  return failure_.error && failure_.ticket <= ticket ? failure_ : Failure{};
}

void Progress::advance() {
  {
    std::lock_guard lock(mutex_);
    ++done_;
  }
  changed_.notify_all();
}

void Progress::fail(const Failure& failure) {
  std::lock_guard lock(mutex_);
  if (!failure_.error) failure_ = failure;
}

bool Progress::failed() const {
  std::lock_guard lock(mutex_);
  return failure_.error != nullptr;
}

Progress::Failure Progress::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

Progress::Failure Progress::take_failure() {
  std::lock_guard lock(mutex_);
  return std::exchange(failure_, Failure{});
}

void HostEvent::set(Point point) {
  std::lock_guard lock(mutex_);
  point_ = std::move(point);
}

HostEvent::Point HostEvent::point() const {
  std::lock_guard lock(mutex_);
  return point_;
}

void HostEvent::synchronize() {
  const Point point = this->point();
  if (!point.progress) return;
  point.progress->await(point.ticket);
  if (const auto failure = point.progress->failure(); failure.error) {
    std::rethrow_exception(failure.error);
  }
}

bool HostEvent::query() const {
  const Point point = this->point();
  return !point.progress || point.progress->reached(point.ticket);
}

HostQueue::HostQueue(HostQueueOptions options)
    : options_(std::move(options)),
      progress_(std::make_shared<Progress>(options_.name)),
      ring_(kCapacity) {
  if (options_.tracer) trace_lane_ = options_.tracer->lane(options_.name);
  thread_ = start_thread(options_.name, [this] {
    omp_set_num_threads(options_.threads);
    loop();
  });
}

HostQueue::~HostQueue() {
  stop();
  thread_.join();
}

void HostQueue::record(Event& event) {
  uint64_t ticket = 0;
  {
    std::lock_guard lock(mutex_);
    ticket = issued_;
  }
  static_cast<HostEvent&>(event).set({progress_, ticket});
}

void HostQueue::wait(const Event& event) {
  HostEvent::Point point = static_cast<const HostEvent&>(event).point();
  if (!point.progress || point.progress == progress_) return;
  const char* name = point.progress->wait_name();
  push(Item{InlineTask(name, [] {}), std::move(point), {}, 0});
}

void HostQueue::wait_gate(Gate gate, uint32_t version) {
  ORLOP_INVARIANT(gate.value != nullptr);
  push(Item{InlineTask("wait_gate", [] {}), {}, gate, version});
}

void HostQueue::upload(void* device, const void* host, size_t bytes) {
  if (bytes == 0) return;
  enqueue("upload", [=] { std::memcpy(device, host, bytes); });
}

void HostQueue::offload(void* host, const void* device, size_t bytes) {
  if (bytes == 0) return;
  enqueue("offload", [=] { std::memcpy(host, device, bytes); });
}

void HostQueue::copy_on_device(void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  enqueue("copy", [=] { std::memmove(to, from, bytes); });
}

void HostQueue::fill_zero(void* device, size_t bytes) {
  if (bytes == 0) return;
  enqueue("fill_zero", [=] { std::memset(device, 0, bytes); });
}

void HostQueue::synchronize() {
  if (const auto failure = drain(); failure.error) std::rethrow_exception(failure.error);
}

Progress::Failure HostQueue::drain() {
  uint64_t ticket = 0;
  {
    std::lock_guard lock(mutex_);
    ticket = issued_;
  }
  progress_->await(ticket);
  return progress_->take_failure();
}

void HostQueue::stop() {
  options_.group->stopped = true;
  { std::lock_guard lock(mutex_); }  // whoever has just found it unset now waits, and is woken
  not_empty_.notify_all();
  not_full_.notify_all();
  if (std::atomic<uint32_t>* gate = waited_gate_.load()) {
    gate->store(Gate::kFailed);
    gate->notify_all();
  }
}

void HostQueue::push(Item item) {
  std::unique_lock lock(mutex_);
  not_full_.wait(lock, [this] { return count_ < ring_.size() || options_.group->stopped; });
  if (options_.group->stopped) return;
  ring_[(head_ + count_) % ring_.size()] = std::move(item);
  ++count_;
  ++issued_;
  lock.unlock();
  not_empty_.notify_one();
}

void HostQueue::loop() {
  Item item;
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      not_empty_.wait(lock, [this] { return count_ > 0 || options_.group->stopped; });
      if (count_ == 0) return;
      item = std::move(ring_[head_]);
      head_ = (head_ + 1) % ring_.size();
      --count_;
      ++started_;
    }
    not_full_.notify_one();
    if (!options_.group->stopped && !progress_->failed()) execute(item);
    progress_->advance();
  }
}

void HostQueue::execute(Item& item) {
  const bool traced = options_.tracer && options_.tracer->enabled();
  const auto begin = traced ? Tracer::Clock::now() : Tracer::Clock::time_point{};
  if (item.event.progress) {
    item.event.progress->await(item.event.ticket);
    const auto failure = item.event.progress->failure_until(item.event.ticket);
    if (failure.error) progress_->fail({failure.error, started_, failure.order});
  } else if (item.gate.value) {
    await_gate(item);
  } else {
    try {
      item.task.run();
    } catch (...) {
      fail_with_current_exception(item.task.name());
    }
  }
  if (traced) options_.tracer->add(trace_lane_, item.task.name(), begin, Tracer::Clock::now());
}

// stop() stores kFailed into the gate that is announced here. Either it sees the announcement, or
// this thread sees `stopped`; versions only grow, so a later store by the owner wakes the wait as
// well.
void HostQueue::await_gate(const Item& item) {
  waited_gate_ = item.gate.value;
  for (;;) {
    const uint32_t value = item.gate.value->load(std::memory_order_acquire);
    if (value >= item.version || options_.group->stopped) break;
    item.gate.value->wait(value, std::memory_order_acquire);
  }
  waited_gate_ = nullptr;
}

void HostQueue::fail_with_current_exception(const char* name) {
  const uint64_t order = options_.group->failures.fetch_add(1);
  std::exception_ptr error;
  try {
    throw;
  } catch (const Error& cause) {
    error = std::make_exception_ptr(
        Error(cause.code(), fmt::format("{} on queue {}: {}", name, options_.name, cause.what())));
  } catch (const std::exception& cause) {
    error = std::make_exception_ptr(Error(
        ErrorCode::kDevice, fmt::format("{} on queue {}: {}", name, options_.name, cause.what())));
  }
  progress_->fail({error, started_, order});
}

}  // namespace orlop::host

#include "tests/support/delayed_backend.h"

#include <utility>

#include "base/bytes.h"
#include "engine/backend_factory.h"

namespace orlop::test {

DelayedBackend::DelayedBackend(std::unique_ptr<Backend> inner, uint64_t seed)
    : page_(kPageBytes), inner_(std::move(inner)), random_(seed) {
  inner_->register_host_memory(page_.data(), kPageBytes);
  clock_ = {new (page_.data()) std::atomic<uint32_t>(0)};
  thread_ = std::thread([this, seed] { tick(seed + 1); });
}

// The clock goes on until the queues have ended what they wait for.
DelayedBackend::~DelayedBackend() {
  inner_.reset();
  ends_ = true;
  thread_.join();
}

Queue& DelayedBackend::queue(QueueKind kind) {
  Queue& queue = inner_->queue(kind);
  std::lock_guard lock(mutex_);
  if (random_() % 3 == 0) {
    const auto ahead = static_cast<uint32_t>(1 + random_() % 3);
    queue.wait_gate(clock_, clock_.value->load() + ahead);
  }
  return queue;
}

void DelayedBackend::tick(uint64_t seed) {
  std::mt19937_64 random(seed);
  for (uint32_t now = 1; !ends_; ++now) {
    std::this_thread::sleep_for(std::chrono::microseconds(50 + random() % 200));
    open_gate(clock_, now);
  }
}

DelayedQueues::DelayedQueues(uint64_t seed) {
  auto opened = std::make_shared<std::atomic<uint64_t>>(0);
  decorate_backends([seed, opened](std::unique_ptr<Backend> backend) {
    return std::make_unique<DelayedBackend>(std::move(backend), 1000 * seed + opened->fetch_add(1));
  });
}

DelayedQueues::~DelayedQueues() { decorate_backends(nullptr); }

}  // namespace orlop::test

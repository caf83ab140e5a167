#include "nvme/posix_backend.h"

#include <unistd.h>

#include <cerrno>

#include "base/check.h"
#include "base/thread.h"

namespace orlop::nvme {
namespace {

int64_t transfer(const IoRequest& request) {
  const auto offset = static_cast<off_t>(request.offset);
  const ssize_t moved = request.op == IoOp::kRead
                            ? ::pread(request.fd, request.data, request.bytes, offset)
                            : ::pwrite(request.fd, request.data, request.bytes, offset);
  return moved >= 0 ? moved : -static_cast<int64_t>(errno);
}

}  // namespace

PosixBackend::PosixBackend(unsigned threads) {
  threads_.reserve(threads);
  for (unsigned i = 0; i < threads; ++i) {
    threads_.push_back(start_thread(fmt::format("io-{}", i), [this] { work(); }));
  }
}

PosixBackend::~PosixBackend() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_ready_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

size_t PosixBackend::submit(std::span<const IoRequest> requests) {
  {
    std::lock_guard lock(mutex_);
    requests_.insert(requests_.end(), requests.begin(), requests.end());
  }
  if (requests.size() == 1) {
    work_ready_.notify_one();
  } else if (requests.size() > 1) {
    work_ready_.notify_all();
  }
  return requests.size();
}

size_t PosixBackend::reap(std::span<IoResult> results, bool wait) {
  std::unique_lock lock(mutex_);
  if (wait) result_ready_.wait(lock, [this] { return woken_ || !results_.empty(); });
  woken_ = false;
  size_t count = 0;
  while (count < results.size() && !results_.empty()) {
    results[count++] = results_.front();
    results_.pop_front();
  }
  return count;
}

void PosixBackend::wake() noexcept {
  {
    std::lock_guard lock(mutex_);
    woken_ = true;
  }
  result_ready_.notify_one();
}

void PosixBackend::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    work_ready_.wait(lock, [this] { return stopping_ || !requests_.empty(); });
    if (requests_.empty()) return;
    const IoRequest request = requests_.front();
    requests_.pop_front();
    lock.unlock();
    const int64_t result = transfer(request);
    lock.lock();
    results_.push_back({request.token, result});
    result_ready_.notify_one();
  }
}

}  // namespace orlop::nvme

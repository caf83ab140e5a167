#include "nvme/io_queue.h"

#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "base/thread.h"
#include "nvme/io_loop.h"

namespace orlop::nvme {
namespace {

constexpr size_t kBlockMultiple = 4096;

}  // namespace

IoQueue::IoQueue(std::unique_ptr<IoBackend> backend, IoQueueOptions options) {
  check(options.block_bytes > 0 && options.block_bytes % kBlockMultiple == 0 &&
            options.block_bytes <= kMaxRequestBytes,
        ErrorCode::kUsage, "nvme.block is {} bytes; use a multiple of {} up to {}",
        options.block_bytes, kBlockMultiple, kMaxRequestBytes);
  check(options.depth > 0, ErrorCode::kUsage, "nvme.queue_depth is 0; use 1 or more");
  loop_ = std::make_shared<IoLoop>(std::move(backend), options);
  thread_ = start_thread("io", [loop = loop_] { loop->run(); });
}

IoQueue::~IoQueue() {
  if (!owner_.is_this()) {
    // A forked child has a copy of the objects but neither thread nor ring: leave them alone.
    new std::thread(std::move(thread_));
    new std::shared_ptr<IoLoop>(std::move(loop_));
    return;
  }
  loop_->stop();
  if (loop_->wait_finished(loop_->options().drain_limit)) {
    thread_.join();
    return;
  }
  log_line(
      LogLevel::kError,
      fmt::format("io: requests are still in flight {} ms after the shut-down began; the kernel "
                  "keeps their memory until they end",
                  loop_->options().drain_limit.count()));
  thread_.detach();
}

void IoQueue::submit(Transfer transfer) { loop_->submit(std::move(transfer)); }

void IoQueue::with_backend(const std::function<void(IoBackend&)>& action) {
  loop_->with_backend(action);
}

std::string_view IoQueue::backend_name() const { return loop_->backend_name(); }

const IoQueueOptions& IoQueue::options() const { return loop_->options(); }

IoQueueStats IoQueue::stats() const { return loop_->stats(); }

}  // namespace orlop::nvme

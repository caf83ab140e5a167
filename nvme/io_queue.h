#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <thread>

#include "base/owner_process.h"
#include "nvme/io_backend.h"

namespace orlop::nvme {

class IoLoop;

// One transfer of any length between memory and a file. A read fills `data`, a write only reads it;
// the memory belongs to the queue until `done` is called.
struct Transfer {
  IoOp op = IoOp::kRead;
  int fd = -1;
  uint64_t offset = 0;  // in the file, bytes
  std::span<std::byte> data;
  size_t alignment = 1;   // the rest of a short transfer starts at a multiple of it from `offset`
  int64_t priority = 0;   // smaller goes first; equal ones in the order of submission
  std::string operation;  // "swap_in of shard 3 chunk 1", for errors
  std::string path;       // of fd, for errors
  // Called once on the thread `io`, with null or the error, when no request of the transfer is in
  // flight any more. It must not throw and must not wait for another transfer.
  std::function<void(std::exception_ptr)> done;
};

struct IoQueueOptions {
  size_t block_bytes = size_t{1} << 20;  // of one request; a multiple of 4096
  unsigned depth = 32;                   // requests in flight
  // EINTR, EAGAIN and transfers without progress are tried again for this long.
  std::chrono::milliseconds retry_limit{10'000};
  // The destructor waits this long for requests in flight.
  std::chrono::milliseconds drain_limit{10'000};
};

struct IoQueueStats {
  uint64_t bytes_read = 0;
  uint64_t bytes_written = 0;
  uint64_t requests = 0;
  uint64_t retries = 0;  // after EINTR and EAGAIN, and rests of short transfers
};

// Owns a backend and the thread `io`, the only one that touches it. Cuts transfers into blocks,
// keeps `depth` of them in flight in order of priority, and finishes what the kernel left short or
// interrupted. The first failing block ends its transfer, after its other blocks have come back;
// other transfers go on.
class IoQueue {
 public:
  IoQueue(std::unique_ptr<IoBackend> backend, IoQueueOptions options);
  // Fails what has not started, waits for what has (at most drain_limit), never throws. In a forked
  // child it does nothing.
  ~IoQueue();
  IoQueue(const IoQueue&) = delete;
  IoQueue& operator=(const IoQueue&) = delete;

  // Any thread. An empty transfer succeeds without a system call.
  void submit(Transfer transfer);

  // Runs `action` on the thread `io` and waits for it: for registering files and buffers. Never
  // from `done`.
  void with_backend(const std::function<void(IoBackend&)>& action);

  std::string_view backend_name() const;
  const IoQueueOptions& options() const;
  IoQueueStats stats() const;

 private:
  const OwnerProcess owner_;
  std::shared_ptr<IoLoop> loop_;  // shared with the thread, which may outlive a bounded destructor
  std::thread thread_;
};

}  // namespace orlop::nvme

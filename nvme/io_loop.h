#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/completion.h"
#include "nvme/io_queue.h"

namespace orlop::nvme {

// What the thread `io` of an IoQueue does: takes transfers from the inbox, cuts blocks, offers them
// to the backend and handles every result in one place, complete().
class IoLoop {
 public:
  IoLoop(std::unique_ptr<IoBackend> backend, IoQueueOptions options);

  // Any thread.
  void submit(Transfer transfer);
  void with_backend(const std::function<void(IoBackend&)>& action);
  void stop();
  bool wait_finished(std::chrono::milliseconds limit);
  IoQueueStats stats() const;
  std::string_view backend_name() const { return backend_->name(); }
  const IoQueueOptions& options() const { return options_; }

  // The body of the thread `io`: until stop() and nothing is in flight.
  void run();

 private:
  using Clock = std::chrono::steady_clock;

  struct Active;
  using WaitingKey = std::pair<int64_t, uint64_t>;  // priority, order of arrival
  using Waiting = std::map<WaitingKey, std::shared_ptr<Active>>;

  // A transfer that waits or has begun; bytes before `issued` have been cut into blocks.
  struct Active {
    Transfer transfer;
    WaitingKey key;
    size_t issued = 0;
    size_t blocks_out = 0;
    std::exception_ptr error;
  };

  // What is left of one block: with the backend, or waiting to be offered (again).
  struct Block {
    std::shared_ptr<Active> active;
    size_t begin = 0;  // from the start of the transfer, bytes
    size_t bytes = 0;
    uint32_t generation = 0;             // changes with every result: a stray one is recognised
    Clock::time_point stuck_since = {};  // first try without progress; zero when there is none
  };

  struct Call {
    const std::function<void(IoBackend&)>* action;
    Completion<> done;
  };

  bool take_inbox();
  void run_calls(const std::vector<Call*>& calls);
  void begin(Transfer transfer);
  void cancel_waiting();
  void cut_blocks();
  void offer();
  IoRequest request_of(size_t index) const;
  void reap();
  void complete(const IoResult& result);
  void progress(size_t index, size_t moved);
  void retry(size_t index, int error);
  void fail(size_t index, std::exception_ptr error);
  std::exception_ptr describe(const Block& block, int error) const;
  void release(size_t index);

  const std::unique_ptr<IoBackend> backend_;
  const IoQueueOptions options_;

  std::mutex mutex_;  // guards the five members below
  std::condition_variable finished_changed_;
  std::vector<Transfer> inbox_;
  std::vector<Call*> calls_;
  bool sleeping_ = false;
  bool stopping_ = false;
  bool finished_ = false;

  // The rest belongs to the thread `io`.
  std::vector<Transfer> arrived_;
  Waiting waiting_;
  uint64_t arrivals_ = 0;
  std::vector<Block> blocks_;
  std::vector<size_t> free_blocks_;
  std::vector<size_t> to_offer_;  // in order: blocks to try again, then new ones
  std::vector<IoRequest> offered_;
  std::vector<IoResult> results_;
  size_t in_backend_ = 0;
  bool moved_ = true;  // the last results brought progress
  bool cancelled_ = false;

  std::atomic<uint64_t> bytes_read_{0};
  std::atomic<uint64_t> bytes_written_{0};
  std::atomic<uint64_t> requests_{0};
  std::atomic<uint64_t> retries_{0};
};

}  // namespace orlop::nvme

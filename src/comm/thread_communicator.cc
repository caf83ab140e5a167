#include "comm/thread_communicator.h"

#include <array>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/thread.h"

namespace orlop {
namespace {

// A barrier that can be broken.
class Meeting {
 public:
  explicit Meeting(int world_size)
      : world_size_(world_size),
        calls_(static_cast<size_t>(world_size)),
        ids_(static_cast<size_t>(world_size)) {}

  // Shows `call` to the other ranks and waits for theirs. They may be read, and what they point to,
  // until leave().
  void enter(int rank, const CollectiveCall& call) {
    std::unique_lock lock(mutex_);
    calls_[static_cast<size_t>(rank)] = call;
    ids_[static_cast<size_t>(rank)] = call.id;
    if (arrived_ + 1 == world_size_ && error_.empty()) {
      error_ = disagreement(ids_);
      if (!error_.empty()) changed_.notify_all();
    }
    arrive(lock);
  }
  void leave() {
    std::unique_lock lock(mutex_);
    arrive(lock);
  }

  const CollectiveCall& call(int rank) const { return calls_[static_cast<size_t>(rank)]; }

  std::string error() const {
    std::lock_guard lock(mutex_);
    return error_;
  }

  void abort(const std::string& reason) {
    std::lock_guard lock(mutex_);
    if (!error_.empty()) return;
    error_ = reason;
    changed_.notify_all();
  }

 private:
  void arrive(std::unique_lock<std::mutex>& lock) {
    const uint64_t meeting = meeting_;
    if (error_.empty() && ++arrived_ == world_size_) {
      arrived_ = 0;
      ++meeting_;
      changed_.notify_all();
    }
    changed_.wait(lock, [&] { return meeting != meeting_ || !error_.empty(); });
    if (meeting == meeting_) fail(ErrorCode::kCommunicator, "{}", error_);
  }

  const int world_size_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<CollectiveCall> calls_;
  std::vector<CollectiveId> ids_;
  int arrived_ = 0;
  uint64_t meeting_ = 0;
  std::string error_;
};

void copy_row(void* to, const void* from, const CollectiveId& id) {
  if (to == from || id.count == 0) return;
  std::memcpy(to, from, static_cast<size_t>(id.count) * dtype_bytes(id.dtype));
}

}  // namespace

class ThreadGroup {
 public:
  explicit ThreadGroup(int ranks) : world_size(ranks) {
    for (auto& meeting : meetings) meeting = std::make_unique<Meeting>(ranks);
  }

  Meeting& meeting(HostCommunicator::Channel channel) {
    return *meetings[static_cast<size_t>(channel)];
  }

  const int world_size;
  // One per channel, because a rank may be in one of each at the same time.
  std::array<std::unique_ptr<Meeting>, HostCommunicator::kChannels> meetings;
};

std::shared_ptr<ThreadGroup> make_thread_group(int world_size) {
  check(world_size >= 1, ErrorCode::kUsage, "a group of {} ranks", world_size);
  return std::make_shared<ThreadGroup>(world_size);
}

void abort_group(ThreadGroup& group, const std::string& reason) {
  for (auto& meeting : group.meetings) meeting->abort(reason);
}

ThreadCommunicator::ThreadCommunicator(std::shared_ptr<ThreadGroup> group, int rank, Issue issue)
    : HostCommunicator(issue), group_(std::move(group)), rank_(rank) {
  ORLOP_INVARIANT(rank >= 0 && rank < group_->world_size);
}

ThreadCommunicator::~ThreadCommunicator() = default;

int ThreadCommunicator::world_size() const { return group_->world_size; }

void ThreadCommunicator::execute(const CollectiveCall& call, Channel channel) {
  Meeting& meeting = group_->meeting(channel);
  meeting.enter(rank_, call);
  switch (call.id.kind) {
    case CollectiveKind::kAllGather:
      for (int r = 0; r < group_->world_size; ++r) {
        copy_row(row_of(call.recv, r, call.id), meeting.call(r).send, call.id);
      }
      break;
    case CollectiveKind::kReduceScatter: {
      std::vector<const void*> rows;
      for (int r = 0; r < group_->world_size; ++r) {
        rows.push_back(row_of(meeting.call(r).send, rank_, call.id));
      }
      sum_in_order(rows, call.recv, call.id.count, call.id.dtype);
      break;
    }
    case CollectiveKind::kAllToAll:
      for (int r = 0; r < group_->world_size; ++r) {
        copy_row(row_of(call.recv, r, call.id), row_of(meeting.call(r).send, rank_, call.id),
                 call.id);
      }
      break;
    case CollectiveKind::kBroadcast:
      copy_row(call.recv, meeting.call(call.id.root).send, call.id);
      break;
  }
  meeting.leave();
}

void ThreadCommunicator::abort(const std::string& reason) noexcept {
  abort_group(*group_, fmt::format("rank {} has failed: {}", rank_, reason));
}

std::string ThreadCommunicator::failure() const {
  for (const auto& meeting : group_->meetings) {
    if (std::string error = meeting->error(); !error.empty()) return error;
  }
  return "";
}

void run_ranks(int world_size, HostCommunicator::Issue issue,
               const std::function<void(Communicator&)>& body) {
  const std::shared_ptr<ThreadGroup> group = make_thread_group(world_size);
  std::mutex mutex;
  std::exception_ptr first_error;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.push_back(start_thread(fmt::format("rank {}", rank), [&, rank] {
      try {
        ThreadCommunicator communicator(group, rank, issue);
        body(communicator);
      } catch (...) {
        {
          std::lock_guard lock(mutex);
          if (!first_error) first_error = std::current_exception();
        }
        abort_group(*group, fmt::format("rank {} has failed", rank));
      }
    }));
  }
  for (std::thread& thread : threads) thread.join();
  if (first_error) std::rethrow_exception(first_error);
}

}  // namespace orlop

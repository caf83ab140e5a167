#pragma once

#include <functional>
#include <memory>

#include "comm/host_communicator.h"

namespace orlop {

class ThreadGroup;

// One rank of a group whose ranks are threads of this process: the oracle for every other
// communicator, and several ranks on a machine without MPI. Buffers are host memory.
class ThreadCommunicator final : public HostCommunicator {
 public:
  ThreadCommunicator(std::shared_ptr<ThreadGroup> group, int rank, Issue issue);
  ~ThreadCommunicator() override;

  int rank() const override { return rank_; }
  int world_size() const override;
  void execute(const CollectiveCall& call, Channel channel) override;
  void abort(const std::string& reason) noexcept override;
  std::string failure() const override;

 private:
  std::shared_ptr<ThreadGroup> group_;
  int rank_;
};

std::shared_ptr<ThreadGroup> make_thread_group(int world_size);

// Fails every collective of the group, waiting or to come, on every rank, with Error(kCommunicator)
// and `reason`. The first call counts.
void abort_group(ThreadGroup& group, const std::string& reason);

// Runs `body` once per rank, each on a thread of its own, and waits for all. An exception of one
// rank aborts the group; the first is thrown here.
void run_ranks(int world_size, HostCommunicator::Issue issue,
               const std::function<void(Communicator&)>& body);

}  // namespace orlop

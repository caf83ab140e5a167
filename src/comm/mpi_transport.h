#pragma once

#include <mpi.h>

#include <condition_variable>
#include <mutex>
#include <vector>

#include "comm/transport.h"

namespace orlop {

// Messages of MPI; a lane is a communicator of its own. MPI says nothing of processes that have
// died, and lets nobody sleep until a message comes.
class MpiTransport final : public Transport {
 public:
  explicit MpiTransport(int lanes);

  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  Request send(int to, int lane, const void* data, size_t bytes) override;
  Request receive(int from, int lane, void* data, size_t bytes) override;
  bool test(Request request) override;
  void cancel(Request request) noexcept override;
  void wait(std::chrono::milliseconds longest, bool hurried) override;
  void wake() noexcept override;
  std::optional<Clock::time_point> lost_since(int, int) const override { return std::nullopt; }
  void finish() override;

 private:
  // MPI counts in int: a large request is several messages.
  struct Slot {
    std::vector<MPI_Request> pieces;
    bool is_receive = false;
    bool is_free = true;
  };

  Request take_slot(bool is_receive);
  template <typename Bytes, typename Call>
  Request start(Bytes* data, size_t bytes, bool is_receive, const Call& call);

  int rank_ = 0;
  int world_size_ = 1;
  std::vector<MPI_Comm> lanes_;
  std::vector<Slot> slots_;
  std::vector<Request> free_;
  std::mutex mutex_;
  std::condition_variable woken_;
  bool is_woken_ = false;
};

}  // namespace orlop

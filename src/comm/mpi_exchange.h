#pragma once

#include <mpi.h>

#include <chrono>
#include <string>
#include <vector>

#include "comm/host_communicator.h"

namespace orlop {

using MpiClock = std::chrono::steady_clock;

// Throws Error(kCommunicator) with MPI's own text unless `result` is success.
void check_mpi(int result, const char* call);

// Collectives of one channel, one at a time, out of point-to-point messages, so that the ranks that
// do not come are known by name and sums run in rank order. First every rank tells every other
// what it calls; when all agree the data moves, directly between the ranks. Never waits: whoever
// drives it calls progress() until that is true. Used by the comm thread only.
class MpiExchange {
 public:
  // Takes a duplicate of `parent`, together with all ranks.
  explicit MpiExchange(MPI_Comm parent);

  void start(const CollectiveCall& call);
  bool active() const { return phase_ != Phase::kIdle; }

  // True when the collective is over. Throws Error(kCommunicator) when the ranks disagree.
  bool progress();

  // Gives up: as far as MPI allows, nothing is written into the caller's buffers any more.
  void abandon() noexcept;

  // Ranks that have not told yet what they call or, if all have, whose data is not here.
  std::vector<int> missing() const;
  // "all_gather of 10 F32 (layer.7), collective number 17"
  std::string description() const;
  MpiClock::time_point started() const { return started_; }

 private:
  enum class Phase : uint8_t { kIdle, kAgree, kData };

  // One message that is under way.
  struct Transfer {
    MPI_Request request = MPI_REQUEST_NULL;
    int source = -1;  // the rank that is waited for; -1: a send
  };

  void send(int to, const void* data, size_t bytes, int tag);
  void receive(int from, void* data, size_t bytes, int tag);
  bool transfers_done();
  void check_agreement() const;
  void start_data();
  void start_round();
  void finish_round();

  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0;
  int world_size_ = 1;
  Phase phase_ = Phase::kIdle;
  CollectiveCall call_;
  uint64_t number_ = 0;
  MpiClock::time_point started_;
  std::vector<CollectiveId> ids_;
  std::vector<Transfer> transfers_;
  // reduce_scatter runs in rounds of so many elements, each rank's part staged here.
  int64_t round_begin_ = 0;
  int64_t round_count_ = 0;
  std::vector<std::byte> staging_;
};

}  // namespace orlop

#pragma once

#include <string>
#include <vector>

#include "comm/host_communicator.h"
#include "comm/transport.h"

namespace orlop {

// Collectives of one channel, one at a time, out of point-to-point messages, so that the ranks that
// do not come are known by name and sums run in rank order. First every rank tells every other
// what it calls; when all agree the data moves, directly between the ranks. Never waits: whoever
// drives it calls progress() until that is true. Used by the comm thread only.
class Exchange {
 public:
  // Has `lane` of the transport, which outlives this, to itself.
  Exchange(Transport& transport, int lane);

  void start(const CollectiveCall& call);
  bool active() const { return phase_ != Phase::kIdle; }

  // True when the collective is over. Throws Error(kCommunicator) when the ranks disagree.
  bool progress();

  // Gives up: as far as the transport allows, the caller's buffers are not touched any more.
  void abandon() noexcept;

  // Ranks that have not told yet what they call or, if all have, whose data is not here.
  std::vector<int> missing() const;
  // "all_gather of 10 F32 (layer.7), collective number 17"
  std::string description() const;
  Transport::Clock::time_point started() const { return started_; }

 private:
  enum class Phase : uint8_t { kIdle, kAgree, kData };

  // One message that is under way.
  struct Transfer {
    Transport::Request request = 0;
    int source = -1;  // the rank that is waited for; -1: a send
  };

  void send(int to, const void* data, size_t bytes);
  void receive(int from, void* data, size_t bytes);
  bool transfers_done();
  void start_data();
  void start_round();
  void finish_round();
  // Where the part of `rank` in the present round of a reduce_scatter arrives.
  std::byte* staged(int rank);

  Transport& transport_;
  const int lane_;
  const int rank_;
  const int world_size_;
  Phase phase_ = Phase::kIdle;
  CollectiveCall call_;
  uint64_t number_ = 0;
  Transport::Clock::time_point started_;
  std::vector<CollectiveId> ids_;
  std::vector<Transfer> transfers_;
  // reduce_scatter runs in rounds of so many elements, each rank's part staged here.
  int64_t round_begin_ = 0;
  int64_t round_count_ = 0;
  std::vector<std::byte> staging_;  // made by the first reduce_scatter
};

}  // namespace orlop

#pragma once

#include <mpi.h>

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "comm/mpi_exchange.h"

namespace orlop {

// What the ranks tell each other beside the collectives: that they live, that they have failed and
// why, that they have left. Used by the comm thread only.
class MpiPeers {
 public:
  // Takes a duplicate of `parent`, together with all ranks.
  MpiPeers(MPI_Comm parent, double silence_seconds);

  // Sends signs of life that are due and takes in what has arrived. Returns why the run cannot go
  // on, if a rank has failed or fallen silent.
  std::optional<std::string> progress();

  // Tells every rank. Only issued: progress() completes it.
  void tell_failed(const std::string& reason);
  void tell_left();

  // The rank has left, longer ago than any message that it sent before can take.
  bool left(int rank) const;
  // Every other rank has left or failed.
  bool all_gone() const;
  // Every other rank has left in good order.
  bool all_left() const;

 private:
  enum class Kind : int32_t { kAlive, kFailed, kLeft };
  struct Message {
    Kind kind = Kind::kAlive;
    std::array<char, 508> text{};
  };
  struct Peer {
    int rank = 0;
    Message incoming;
    MPI_Request receive = MPI_REQUEST_NULL;
    MPI_Request alive = MPI_REQUEST_NULL;  // the last sign of life sent to it
    MPI_Request news = MPI_REQUEST_NULL;   // the last other message sent to it
    MpiClock::time_point heard;
    std::optional<MpiClock::time_point> left;
    bool failed = false;
  };

  void listen(Peer& peer);
  void take_in(Peer& peer, std::optional<std::string>& reason);
  void tell(const Message& message);
  bool silent_too_long(const Peer& peer, MpiClock::time_point now) const;

  MPI_Comm comm_ = MPI_COMM_NULL;
  std::chrono::duration<double> silence_;
  std::vector<Peer> peers_;  // all ranks but this one
  Message alive_;
  Message news_;  // kept while it is being sent
  MpiClock::time_point last_progress_;
  MpiClock::time_point last_sign_;
};

}  // namespace orlop

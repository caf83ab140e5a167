#pragma once

#include <array>
#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "comm/transport.h"

namespace orlop {

// What the ranks tell each other beside the collectives: that they live, that they have failed and
// why, that they have left. Used by the comm thread only.
class Peers {
 public:
  // Has `lane` of the transport, which outlives this, to itself. A rank that gives no sign of life
  // for `silence_seconds` counts as dead.
  Peers(Transport& transport, int lane, double silence_seconds);

  // Sends signs of life that are due and takes in what has arrived. Returns why the run cannot go
  // on, if a rank has failed, died or fallen silent.
  std::optional<std::string> progress();

  // Tells every rank its last news from this one; signs of life end with it. Only issued:
  // progress() completes it.
  void tell_failed(const std::string& reason);
  void tell_left();
  // The last news has gone out to every rank that still lives.
  bool told() const;

  // The rank has left, longer ago than any message that it sent before can take.
  bool left(int rank) const;
  // Every other rank has left or failed.
  bool all_gone() const;
  // Every other rank has left in good order.
  bool all_left() const;

 private:
  using Clock = Transport::Clock;

  enum class Kind : int32_t { kAlive, kFailed, kLeft };
  struct Message {
    Kind kind = Kind::kAlive;
    std::array<char, 508> text{};
  };
  struct Peer {
    int rank = 0;
    Message incoming;
    std::optional<Transport::Request> receive;
    std::optional<Transport::Request> alive;  // the last sign of life sent to it
    std::optional<Transport::Request> news;   // what else was sent to it
    Clock::time_point heard;
    std::optional<Clock::time_point> left;
    bool failed = false;
  };

  void listen(Peer& peer);
  void take_in(Peer& peer, std::optional<std::string>& reason);
  // Why the peer counts as dead, if it does.
  std::optional<std::string> death_of(const Peer& peer, Clock::time_point now) const;
  void tell(const Message& message);
  // True when nothing is under way by `request`.
  bool settled(std::optional<Transport::Request>& request);

  Transport& transport_;
  const int lane_;
  const std::chrono::duration<double> silence_;
  std::vector<Peer> peers_;  // all ranks but this one
  Message alive_;
  Message news_;  // kept while it is being sent
  bool has_told_ = false;
  Clock::time_point last_progress_;
  Clock::time_point last_sign_;
};

}  // namespace orlop

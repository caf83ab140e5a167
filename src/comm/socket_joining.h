#pragma once

#include <array>
#include <chrono>
#include <string>
#include <vector>

#include "comm/socket_reception.h"
#include "comm/socket_rendezvous.h"

// The two sides of the rendezvous; used by socket_rendezvous alone.
namespace orlop {

// For a message that is on its way already.
inline constexpr std::chrono::seconds kAnswerTime{10};

// From rank 0 that all have come, that all are connected, or why not; from another rank that it is
// connected, or why not. Plain bytes, the same for every version of Orlop.
struct Answer {
  int32_t failed = 0;
  std::array<char, 1020> text{};  // ends with 0; cut when it is longer
};
Answer failed_answer(const std::string& text);

// Where a rank listens, as rank 0 sees it: plain bytes, sent to all when all have come.
struct Place {
  sockaddr_storage address{};
  socklen_t bytes = 0;
};

// What both sides share: the reception, and the links that are made.
class Joining {
 public:
  Joining(const SocketOptions& options, int lanes, UniqueFd listener);

 protected:
  // Takes a link that a higher rank has made.
  void add_link(Reception::Guest guest);
  UniqueFd& link_to(int rank, int lane) {
    return links_[static_cast<size_t>(rank)][static_cast<size_t>(lane)];
  }
  bool all_linked() const { return links_made_ == lanes_ * (options_.world_size - 1); }
  // The ranks to which a lane is missing.
  std::vector<int> unlinked() const;

  const SocketOptions& options_;
  const int lanes_;
  const SocketClock::time_point deadline_;
  Reception reception_;
  SocketLinks links_;
  int links_made_ = 0;
};

SocketClock::time_point deadline_of(const SocketOptions& options);
// "ranks 2, 3 of 4 have", "rank 2 of 4 has"
std::string subject(const std::vector<int>& ranks, int world_size);

SocketLinks join_as_first_rank(const SocketOptions& options, int lanes);
SocketLinks join_as_other_rank(const SocketOptions& options, int lanes);

}  // namespace orlop

#pragma once

#include <string>
#include <vector>

#include "base/unique_fd.h"

namespace orlop {

struct SocketOptions {
  int rank = 0;
  int world_size = 1;
  std::string rendezvous;     // host:port where rank 0 listens
  int listener = -1;          // of rank 0: a socket that listens there already, which it takes over
  double join_seconds = 300;  // for all ranks to come
};

// The connections of one rank: links[rank][lane]; none to itself.
using SocketLinks = std::vector<std::vector<UniqueFd>>;

// Connects every rank with every other, once per lane, by TCP. The ranks come to rank 0, which
// tells each of them where all others listen; then the higher rank of each pair connects to the
// lower one. Returns on all ranks when all are connected. Throws Error(kCommunicator), the same on
// every rank that has come, when ranks do not come in time, one comes twice, or what they say of
// the run differs.
SocketLinks join_by_sockets(const SocketOptions& options, int lanes);

}  // namespace orlop

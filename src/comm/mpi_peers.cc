#include "comm/mpi_peers.h"

#include <algorithm>

#include "base/check.h"

namespace orlop {
namespace {

constexpr std::chrono::seconds kSignInterval{1};
// This thread did not run for so long: what others sent meanwhile is only being looked at now.
constexpr std::chrono::seconds kOwnPause{3};
// How long messages that were sent before a rank left may still be on their way.
constexpr std::chrono::seconds kLastMessages{2};
constexpr int kTag = 3;

bool is_done(MPI_Request& request) {
  int done = 0;
  check_mpi(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
  return done != 0;
}

}  // namespace

MpiPeers::MpiPeers(MPI_Comm parent, double silence_seconds) : silence_(silence_seconds) {
  check_mpi(MPI_Comm_dup(parent, &comm_), "MPI_Comm_dup");
  check_mpi(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  int rank = 0;
  int world_size = 1;
  MPI_Comm_rank(comm_, &rank);
  MPI_Comm_size(comm_, &world_size);
  last_progress_ = last_sign_ = MpiClock::now();
  for (int r = 0; r < world_size; ++r) {
    if (r != rank) peers_.push_back({.rank = r, .incoming = {}, .heard = last_sign_, .left = {}});
  }
  for (Peer& peer : peers_) listen(peer);  // the vector does not move any more
}

void MpiPeers::listen(Peer& peer) {
  check_mpi(
      MPI_Irecv(&peer.incoming, sizeof(Message), MPI_BYTE, peer.rank, kTag, comm_, &peer.receive),
      "MPI_Irecv");
}

std::optional<std::string> MpiPeers::progress() {
  const MpiClock::time_point now = MpiClock::now();
  if (now - last_progress_ > kOwnPause) {
    for (Peer& peer : peers_) peer.heard = now;
  }
  last_progress_ = now;
  const bool sign_is_due = now - last_sign_ >= kSignInterval;
  if (sign_is_due) last_sign_ = now;
  std::optional<std::string> reason;
  for (Peer& peer : peers_) {
    take_in(peer, reason);
    is_done(peer.news);
    if (is_done(peer.alive) && sign_is_due) {
      check_mpi(MPI_Isend(&alive_, sizeof(Message), MPI_BYTE, peer.rank, kTag, comm_, &peer.alive),
                "MPI_Isend");
    }
    if (!reason && silent_too_long(peer, now)) {
      peer.failed = true;
      reason = fmt::format(
          "rank {} has given no sign of life for {:.0f} s: its process has ended "
          "or its machine cannot be reached",
          peer.rank, silence_.count());
    }
  }
  return reason;
}

void MpiPeers::take_in(Peer& peer, std::optional<std::string>& reason) {
  while (peer.receive != MPI_REQUEST_NULL && is_done(peer.receive)) {
    peer.heard = MpiClock::now();
    if (peer.incoming.kind == Kind::kLeft) peer.left = peer.heard;
    if (peer.incoming.kind == Kind::kFailed) {
      peer.failed = true;
      if (!reason) reason = peer.incoming.text.data();
    }
    if (!peer.left) listen(peer);
  }
}

bool MpiPeers::silent_too_long(const Peer& peer, MpiClock::time_point now) const {
  return !peer.left && !peer.failed && now - peer.heard > silence_;
}

void MpiPeers::tell(const Message& message) {
  news_ = message;
  for (Peer& peer : peers_) {
    if (peer.news != MPI_REQUEST_NULL) check_mpi(MPI_Request_free(&peer.news), "MPI_Request_free");
    check_mpi(MPI_Isend(&news_, sizeof(Message), MPI_BYTE, peer.rank, kTag, comm_, &peer.news),
              "MPI_Isend");
  }
}

void MpiPeers::tell_failed(const std::string& reason) {
  Message message;
  message.kind = Kind::kFailed;
  std::copy_n(reason.begin(), std::min(reason.size(), message.text.size() - 1),
              message.text.begin());
  tell(message);
}

void MpiPeers::tell_left() {
  Message message;
  message.kind = Kind::kLeft;
  tell(message);
}

bool MpiPeers::left(int rank) const {
  return std::any_of(peers_.begin(), peers_.end(), [&](const Peer& peer) {
    return peer.rank == rank && peer.left && MpiClock::now() - *peer.left > kLastMessages;
  });
}

bool MpiPeers::all_gone() const {
  return std::all_of(peers_.begin(), peers_.end(),
                     [](const Peer& peer) { return peer.left || peer.failed; });
}

bool MpiPeers::all_left() const {
  return std::all_of(peers_.begin(), peers_.end(),
                     [](const Peer& peer) { return peer.left && !peer.failed; });
}

}  // namespace orlop

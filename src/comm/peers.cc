#include "comm/peers.h"

#include <algorithm>

#include "base/check.h"

namespace orlop {
namespace {

constexpr std::chrono::seconds kSignInterval{1};
// This thread did not run for so long: what others sent meanwhile is only being looked at now.
constexpr std::chrono::seconds kOwnPause{3};
// How long messages that were sent before a rank left may still be on their way.
constexpr std::chrono::seconds kLastMessages{2};

}  // namespace

Peers::Peers(Transport& transport, int lane, double silence_seconds)
    : transport_(transport), lane_(lane), silence_(silence_seconds) {
  last_progress_ = last_sign_ = Clock::now();
  for (int r = 0; r < transport.world_size(); ++r) {
    if (r == transport.rank()) continue;
    Peer& peer = peers_.emplace_back();
    peer.rank = r;
    peer.heard = last_sign_;
  }
  for (Peer& peer : peers_) listen(peer);  // the vector does not move any more
}

void Peers::listen(Peer& peer) {
  peer.receive = transport_.receive(peer.rank, lane_, &peer.incoming, sizeof(Message));
}

bool Peers::settled(std::optional<Transport::Request>& request) {
  if (request && transport_.test(*request)) request.reset();
  return !request;
}

std::optional<std::string> Peers::progress() {
  const Clock::time_point now = Clock::now();
  if (now - last_progress_ > kOwnPause) {
    for (Peer& peer : peers_) peer.heard = now;
  }
  last_progress_ = now;
  const bool sign_is_due = !has_told_ && now - last_sign_ >= kSignInterval;
  if (sign_is_due) last_sign_ = now;
  std::optional<std::string> reason;
  for (Peer& peer : peers_) {
    take_in(peer, reason);
    settled(peer.news);
    if (settled(peer.alive) && sign_is_due) {
      peer.alive = transport_.send(peer.rank, lane_, &alive_, sizeof(Message));
    }
    if (const auto death = death_of(peer, now)) {
      peer.failed = true;
      if (!reason) reason = death;
    }
  }
  return reason;
}

void Peers::take_in(Peer& peer, std::optional<std::string>& reason) {
  while (peer.receive && settled(peer.receive)) {
    peer.heard = Clock::now();
    if (peer.incoming.kind == Kind::kLeft) peer.left = peer.heard;
    if (peer.incoming.kind == Kind::kFailed) {
      peer.failed = true;
      if (!reason) reason = peer.incoming.text.data();
    }
    if (!peer.left) listen(peer);
  }
}

std::optional<std::string> Peers::death_of(const Peer& peer, Clock::time_point now) const {
  if (peer.left || peer.failed) return std::nullopt;
  if (transport_.lost_since(peer.rank, lane_)) {
    return fmt::format("rank {} has ended without a word: its process was killed or has crashed",
                       peer.rank);
  }
  if (now - peer.heard <= silence_) return std::nullopt;
  return fmt::format(
      "rank {} has given no sign of life for {:.0f} s: its process has ended or its machine cannot "
      "be reached",
      peer.rank, silence_.count());
}

void Peers::tell(const Message& message) {
  ORLOP_INVARIANT(!has_told_);
  has_told_ = true;
  news_ = message;
  for (Peer& peer : peers_) {
    peer.news = transport_.send(peer.rank, lane_, &news_, sizeof(Message));
  }
}

void Peers::tell_failed(const std::string& reason) {
  Message message;
  message.kind = Kind::kFailed;
  std::copy_n(reason.begin(), std::min(reason.size(), message.text.size() - 1),
              message.text.begin());
  tell(message);
}

void Peers::tell_left() {
  Message message;
  message.kind = Kind::kLeft;
  tell(message);
}

bool Peers::told() const {
  return has_told_ && std::all_of(peers_.begin(), peers_.end(),
                                  [](const Peer& peer) { return !peer.news || peer.failed; });
}

bool Peers::left(int rank) const {
  return std::any_of(peers_.begin(), peers_.end(), [&](const Peer& peer) {
    return peer.rank == rank && peer.left && Clock::now() - *peer.left > kLastMessages;
  });
}

bool Peers::all_gone() const {
  return std::all_of(peers_.begin(), peers_.end(),
                     [](const Peer& peer) { return peer.left || peer.failed; });
}

bool Peers::all_left() const {
  return std::all_of(peers_.begin(), peers_.end(),
                     [](const Peer& peer) { return peer.left && !peer.failed; });
}

}  // namespace orlop

#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "base/check.h"
#include "comm/socket_joining.h"

namespace orlop {
namespace {

// So long rank 0 stays to tell those why who come after the end.
constexpr std::chrono::seconds kFarewell{3};

class FirstRank : Joining {
 public:
  FirstRank(const SocketOptions& options, int lanes, UniqueFd listener)
      : Joining(options, lanes, std::move(listener)),
        guests_(static_cast<size_t>(options.world_size)),
        ready_(static_cast<size_t>(options.world_size)) {
    ready_.front() = true;
  }

  SocketLinks join() {
    try {
      while (!missing().empty()) {
        if (auto guest = next_guest(missing(), "come")) receive_rank(std::move(*guest));
      }
      tell_places();
      while (!all_linked() || !unready().empty()) {
        auto guest = next_guest(all_linked() ? unready() : unlinked(), "connected");
        if (!guest) continue;
        if (guest->hello.lane == Hello::kNoLane) {
          receive_rank(std::move(*guest));  // one too many
        } else {
          add_link(std::move(*guest));
        }
      }
      tell({});
    } catch (const Error& error) {
      tell_failure(error.what());
      throw;
    }
    return std::move(links_);
  }

 private:
  std::vector<int> missing() const {
    std::vector<int> ranks;
    for (int r = 1; r < options_.world_size; ++r) {
      if (!guests_[static_cast<size_t>(r)].fd) ranks.push_back(r);
    }
    return ranks;
  }

  std::vector<int> unready() const {
    std::vector<int> ranks;
    for (int r = 1; r < options_.world_size; ++r) {
      if (!ready_[static_cast<size_t>(r)]) ranks.push_back(r);
    }
    return ranks;
  }

  // A guest, or nothing when a rank that had come before has said something.
  std::optional<Reception::Guest> next_guest(const std::vector<int>& awaited, const char* what) {
    std::vector<int> controls;
    for (const Reception::Guest& guest : guests_) {
      if (guest.fd) controls.push_back(guest.fd.get());
    }
    std::optional<int> readable;
    auto guest = reception_.next(deadline_, controls, readable);
    if (readable) {
      hear(*readable);
    } else if (!guest) {
      fail(ErrorCode::kCommunicator, "{} not {} to {} within {:.0f} s",
           subject(awaited, options_.world_size), what, options_.rendezvous, options_.join_seconds);
    }
    return guest;
  }

  void receive_rank(Reception::Guest guest) {
    const Hello& hello = guest.hello;
    const Hello own = make_hello(0, options_.world_size, Hello::kNoLane, 0);
    const auto refuse = [&](bool refused, const std::string& reason) {
      if (!refused) return;
      late_ = std::move(guest.fd);  // is told as the others are
      fail(ErrorCode::kCommunicator, "{}", reason);
    };
    refuse(hello.version != own.version,
           fmt::format("rank {} ({}) runs Orlop {}, rank 0 runs {}; install one version on all "
                       "hosts",
                       hello.rank, guest.address.text(), hello.version.data(), own.version.data()));
    refuse(hello.world_size != options_.world_size,
           fmt::format("rank {} ({}) belongs to a run of {} ranks, rank 0 to one of {}", hello.rank,
                       guest.address.text(), hello.world_size, options_.world_size));
    refuse(hello.rank < 1 || hello.rank >= options_.world_size || hello.lane != Hello::kNoLane,
           fmt::format("rank {} ({}) has come to a run of {} ranks", hello.rank,
                       guest.address.text(), options_.world_size));
    Reception::Guest& place = guests_[static_cast<size_t>(hello.rank)];
    refuse(static_cast<bool>(place.fd),
           fmt::format("rank {} has come twice, from {} and from {}", hello.rank,
                       place.fd ? place.address.text() : "", guest.address.text()));
    place = std::move(guest);
  }

  // What a rank says of itself, or its end.
  void hear(int control) {
    const auto guest = std::find_if(
        guests_.begin(), guests_.end(),
        [&](const Reception::Guest& candidate) { return candidate.fd.get() == control; });
    const auto rank = guest - guests_.begin();
    Answer answer;
    check(receive_all(control, &answer, sizeof answer, SocketClock::now() + kAnswerTime),
          ErrorCode::kCommunicator, "rank {} has ended while the ranks were joining", rank);
    answer.text.back() = '\0';
    check(answer.failed == 0, ErrorCode::kCommunicator, "rank {}: {}", rank, answer.text.data());
    ready_[static_cast<size_t>(rank)] = true;
  }

  void tell_places() {
    std::vector<Place> places(guests_.size());
    for (size_t r = 1; r < guests_.size(); ++r) {
      SocketAddress address = guests_[r].address;
      address.set_port(guests_[r].hello.port);
      std::memcpy(&places[r].address, address.get(), address.bytes());
      places[r].bytes = address.bytes();
    }
    tell({});
    send_to_all(places.data(), places.size() * sizeof(Place));
  }

  void tell(const Answer& answer) { send_to_all(&answer, sizeof answer); }

  // That a rank has ended meanwhile shows when it is heard, or in its news when all are connected.
  void send_to_all(const void* data, size_t bytes) {
    for (size_t r = 1; r < guests_.size(); ++r) {
      send_all(guests_[r].fd.get(), data, bytes, deadline_);
    }
  }

  // To all who have come and, for a while, to those who come now.
  void tell_failure(const std::string& reason) noexcept {
    const Answer answer = failed_answer(reason);
    const auto tell_one = [&](int fd) {
      send_all(fd, &answer, sizeof answer, SocketClock::now() + kFarewell);
    };
    for (const Reception::Guest& guest : guests_) {
      if (guest.fd) tell_one(guest.fd.get());
    }
    if (late_) tell_one(late_.get());
    const SocketClock::time_point end = SocketClock::now() + kFarewell;
    std::vector<int> untold = missing();
    try {
      while (!untold.empty() && SocketClock::now() < end) {
        std::optional<int> unused;
        const auto guest = reception_.next(end, {}, unused);
        if (!guest) continue;
        tell_one(guest->fd.get());
        std::erase(untold, guest->hello.rank);
      }
    } catch (const std::exception&) {  // who comes late does not learn why
    }
  }

  std::vector<Reception::Guest> guests_;  // by rank: their first connection, for such words
  std::vector<bool> ready_;
  UniqueFd late_;
};

// A name may have addresses that this host does not have.
UniqueFd listen_at_first_of(const std::vector<SocketAddress>& addresses) {
  for (size_t i = 0; i + 1 < addresses.size(); ++i) {
    try {
      return listen_at(addresses[i]);
    } catch (const Error&) {  // the error of the last counts
    }
  }
  return listen_at(addresses.back());
}

UniqueFd listener_of(const SocketOptions& options) {
  if (options.listener < 0) return listen_at_first_of(resolve(options.rendezvous));
  int listens = 0;
  socklen_t bytes = sizeof listens;
  const bool is_socket =
      ::getsockopt(options.listener, SOL_SOCKET, SO_ACCEPTCONN, &listens, &bytes) == 0;
  check(is_socket && listens != 0, ErrorCode::kUsage,
        "file descriptor {} is no socket that listens", options.listener);
  UniqueFd listener(options.listener);
  const int flags = ::fcntl(listener.get(), F_GETFL);
  ::fcntl(listener.get(), F_SETFL, flags | O_NONBLOCK);
  ::fcntl(listener.get(), F_SETFD, FD_CLOEXEC);
  return listener;
}

}  // namespace

SocketLinks join_as_first_rank(const SocketOptions& options, int lanes) {
  return FirstRank(options, lanes, listener_of(options)).join();
}

}  // namespace orlop

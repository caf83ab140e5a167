#include "comm/socket_reception.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <vector>

#include "base/check.h"

namespace orlop {
namespace {

// A stranger who has not said hello for so long never will.
constexpr std::chrono::seconds kPatience{10};
constexpr std::chrono::milliseconds kLongestPoll{500};

}  // namespace

Hello make_hello(int rank, int world_size, int lane, uint16_t port) {
  Hello hello;
  constexpr std::string_view version = ORLOP_VERSION;
  static_assert(version.size() < sizeof hello.version);
  std::copy(version.begin(), version.end(), hello.version.begin());
  hello.rank = rank;
  hello.world_size = world_size;
  hello.lane = lane;
  hello.port = port;
  return hello;
}

std::optional<Reception::Guest> Reception::next(SocketClock::time_point deadline,
                                                std::span<const int> watched,
                                                std::optional<int>& readable) {
  readable.reset();
  for (;;) {
    const SocketClock::time_point now = SocketClock::now();
    if (now >= deadline) return std::nullopt;
    strangers_.remove_if([&](const Stranger& s) { return now - s.since > kPatience; });
    std::vector<pollfd> polled{{.fd = listener_.get(), .events = POLLIN, .revents = 0}};
    for (const int fd : watched) polled.push_back({.fd = fd, .events = POLLIN, .revents = 0});
    for (const Stranger& s : strangers_) {
      polled.push_back({.fd = s.guest.fd.get(), .events = POLLIN, .revents = 0});
    }
    const auto longest = std::min<SocketClock::duration>(kLongestPoll, deadline - now);
    const int ready =
        ::poll(polled.data(), polled.size(),
               static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(longest).count()));
    check(ready >= 0 || errno == EINTR, ErrorCode::kCommunicator, "poll: {}", errno_text(errno));
    if (ready <= 0) continue;
    for (size_t i = 0; i < watched.size(); ++i) {
      if (polled[1 + i].revents == 0) continue;
      readable = watched[i];
      return std::nullopt;
    }
    size_t place = 1 + watched.size();
    for (auto stranger = strangers_.begin(); stranger != strangers_.end(); ++place) {
      const auto heard = stranger++;
      if (polled[place].revents == 0) continue;
      if (auto guest = hear(heard)) return guest;
    }
    if (polled.front().revents != 0) accept_all();
  }
}

void Reception::accept_all() {
  for (;;) {
    sockaddr_storage from{};
    socklen_t bytes = sizeof from;
    UniqueFd fd(::accept4(listener_.get(), reinterpret_cast<sockaddr*>(&from), &bytes,
                          SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (fd) {
      const SocketAddress address(reinterpret_cast<const sockaddr*>(&from), bytes);
      strangers_.push_back({.guest = {.fd = std::move(fd), .hello = {}, .address = address},
                            .since = SocketClock::now()});
      continue;
    }
    check(errno != EMFILE && errno != ENFILE, ErrorCode::kCommunicator,
          "accept: {}; raise 'ulimit -n'", errno_text(errno));
    // A guest who has gone already is nobody; everything else waits for the next poll.
    if (errno != ECONNABORTED && errno != EINTR) return;
  }
}

// A guest when the hello is complete. Who is no rank leaves the list.
std::optional<Reception::Guest> Reception::hear(std::list<Stranger>::iterator stranger) {
  std::byte* hello = reinterpret_cast<std::byte*>(&stranger->guest.hello);
  const ssize_t got = ::recv(stranger->guest.fd.get(), hello + stranger->got,
                             sizeof(Hello) - stranger->got, MSG_DONTWAIT);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return std::nullopt;
  if (got > 0) stranger->got += static_cast<size_t>(got);
  constexpr uint64_t magic = Hello::kMagic;
  const bool is_rank = std::memcmp(hello, &magic, std::min(stranger->got, sizeof magic)) == 0;
  if (got > 0 && is_rank && stranger->got < sizeof(Hello)) return std::nullopt;
  std::optional<Guest> guest;
  if (got > 0 && is_rank) {
    guest = std::move(stranger->guest);
    guest->hello.version.back() = '\0';
  }
  strangers_.erase(stranger);
  return guest;
}

}  // namespace orlop

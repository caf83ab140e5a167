#include "comm/socket_rendezvous.h"

#include <netinet/in.h>
#include <netinet/tcp.h>

#include <algorithm>

#include "base/check.h"
#include "comm/socket_joining.h"

namespace orlop {
namespace {

// For a link that carries a run: small messages go at once, and what stands between two hosts
// does not forget a link that is idle.
void prepare(int fd) {
  constexpr int on = 1;
  constexpr int idle_seconds = 60;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_seconds, sizeof idle_seconds);
}

}  // namespace

Answer failed_answer(const std::string& text) {
  Answer answer{.failed = 1, .text = {}};
  std::copy_n(text.begin(), std::min(text.size(), answer.text.size() - 1), answer.text.begin());
  return answer;
}

SocketClock::time_point deadline_of(const SocketOptions& options) {
  return SocketClock::now() + std::chrono::duration_cast<SocketClock::duration>(
                                  std::chrono::duration<double>(options.join_seconds));
}

std::string subject(const std::vector<int>& ranks, int world_size) {
  return fmt::format("rank{} {} of {} {}", ranks.size() == 1 ? "" : "s", fmt::join(ranks, ", "),
                     world_size, ranks.size() == 1 ? "has" : "have");
}

Joining::Joining(const SocketOptions& options, int lanes, UniqueFd listener)
    : options_(options),
      lanes_(lanes),
      deadline_(deadline_of(options)),
      reception_(std::move(listener)),
      links_(static_cast<size_t>(options.world_size)) {
  for (int r = 0; r < options.world_size; ++r) {
    if (r != options.rank) links_[static_cast<size_t>(r)].resize(static_cast<size_t>(lanes));
  }
}

void Joining::add_link(Reception::Guest guest) {
  const Hello& hello = guest.hello;
  check(hello.rank > options_.rank && hello.rank < options_.world_size && hello.lane >= 0 &&
            hello.lane < lanes_ && hello.world_size == options_.world_size,
        ErrorCode::kCommunicator, "rank {} of {} has come to rank {} of {} for lane {}", hello.rank,
        hello.world_size, options_.rank, options_.world_size, hello.lane);
  UniqueFd& link = link_to(hello.rank, hello.lane);
  check(!link, ErrorCode::kCommunicator, "rank {} has come twice for lane {}", hello.rank,
        hello.lane);
  link = std::move(guest.fd);
  ++links_made_;
}

std::vector<int> Joining::unlinked() const {
  std::vector<int> ranks;
  for (int r = 0; r < options_.world_size; ++r) {
    const auto& links = links_[static_cast<size_t>(r)];
    const bool whole = std::all_of(links.begin(), links.end(),
                                   [](const UniqueFd& link) { return static_cast<bool>(link); });
    if (!whole) ranks.push_back(r);
  }
  return ranks;
}

SocketLinks join_by_sockets(const SocketOptions& options, int lanes) {
  SocketLinks links =
      options.rank == 0 ? join_as_first_rank(options, lanes) : join_as_other_rank(options, lanes);
  for (const auto& of_rank : links) {
    for (const UniqueFd& link : of_rank) prepare(link.get());
  }
  return links;
}

}  // namespace orlop

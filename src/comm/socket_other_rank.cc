#include <cerrno>
#include <optional>
#include <thread>

#include "base/check.h"
#include "comm/socket_joining.h"

namespace orlop {
namespace {

// Between two attempts to reach rank 0.
constexpr std::chrono::milliseconds kRetryPause{50};
// Beyond the time for joining: rank 0 knows who is missing, and says so.
constexpr std::chrono::seconds kVerdictTime{5};

class OtherRank : Joining {
 public:
  OtherRank(const SocketOptions& options, int lanes, UniqueFd first, UniqueFd listener)
      : Joining(options, lanes, std::move(listener)), first_(std::move(first)) {}

  SocketLinks join() {
    say(make_hello(options_.rank, options_.world_size, Hello::kNoLane,
                   reception_.address().port()));
    hear_first();
    std::vector<Place> places(links_.size());
    if (!receive_all(first_.get(), places.data(), places.size() * sizeof(Place), deadline_)) {
      first_is_gone();
    }
    try {
      for (int r = 0; r < options_.rank; ++r) link(r, address_of(r, places));
      while (!all_linked()) accept_link();
    } catch (const Error& error) {
      if (!over_) {
        say(failed_answer(error.what()));
        hear_first();  // throws what all ranks are told
      }
      throw;
    }
    say(Answer{});
    hear_first();
    return std::move(links_);
  }

 private:
  [[noreturn]] void first_is_gone() {
    const bool is_late = errno == ETIMEDOUT;
    over_ = true;
    fail(ErrorCode::kCommunicator, "rank 0 at {} has {}", options_.rendezvous,
         is_late ? fmt::format("not answered within {:.0f} s", options_.join_seconds)
                 : "ended while the ranks were joining");
  }

  template <typename Message>
  void say(const Message& message) {
    if (!send_all(first_.get(), &message, sizeof message, deadline_ + kVerdictTime)) {
      first_is_gone();
    }
  }

  void hear_first() {
    Answer answer;
    if (!receive_all(first_.get(), &answer, sizeof answer, deadline_ + kVerdictTime)) {
      first_is_gone();
    }
    answer.text.back() = '\0';
    over_ = answer.failed != 0;
    check(answer.failed == 0, ErrorCode::kCommunicator, "{}", answer.text.data());
  }

  SocketAddress address_of(int rank, const std::vector<Place>& places) const {
    if (rank == 0) return SocketAddress::peer(first_.get());
    const Place& place = places[static_cast<size_t>(rank)];
    SocketAddress address(reinterpret_cast<const sockaddr*>(&place.address), place.bytes);
    // A link-local address leads out by a link of this host, whatever rank 0's is called.
    if (address.scope() != 0) address.set_scope(SocketAddress::own(first_.get()).scope());
    return address;
  }

  void link(int rank, const SocketAddress& address) {
    for (int lane = 0; lane < lanes_; ++lane) {
      UniqueFd fd = connect_to(address, deadline_);
      const Hello hello = make_hello(options_.rank, options_.world_size, lane, 0);
      if (!fd || !send_all(fd.get(), &hello, sizeof hello, deadline_)) {
        const int error = errno;
        fail(ErrorCode::kCommunicator, "cannot reach rank {} at {}: {}", rank, address.text(),
             errno_text(error));
      }
      link_to(rank, lane) = std::move(fd);
      ++links_made_;
    }
  }

  void accept_link() {
    std::optional<int> readable;
    const int control = first_.get();
    auto guest = reception_.next(deadline_, std::span(&control, 1), readable);
    if (readable) {
      hear_first();
      fail(ErrorCode::kCommunicator, "rank 0 speaks before its turn");
    }
    check(guest.has_value(), ErrorCode::kCommunicator, "{} not connected within {:.0f} s",
          subject(unlinked(), options_.world_size), options_.join_seconds);
    add_link(std::move(*guest));
  }

  UniqueFd first_;     // to rank 0, for such words
  bool over_ = false;  // rank 0 has told why the ranks do not meet, or is gone
};

// Rank 0 may listen later than this rank looks for it, or have a name later.
UniqueFd connect_to_first_rank(const SocketOptions& options) {
  const SocketClock::time_point deadline = deadline_of(options);
  for (;;) {
    std::string reason;
    try {
      for (const SocketAddress& address : resolve(options.rendezvous)) {
        UniqueFd fd = connect_to(address, deadline);
        if (fd) return fd;
        reason = errno_text(errno);
      }
    } catch (const Error& error) {
      if (error.code() == ErrorCode::kUsage) throw;
      reason = error.what();
    }
    check(SocketClock::now() < deadline, ErrorCode::kCommunicator,
          "rank {} of {} has not reached rank 0 at {} within {:.0f} s: {}", options.rank,
          options.world_size, options.rendezvous, options.join_seconds, reason);
    std::this_thread::sleep_for(kRetryPause);
  }
}

}  // namespace

SocketLinks join_as_other_rank(const SocketOptions& options, int lanes) {
  UniqueFd first = connect_to_first_rank(options);
  SocketAddress here = SocketAddress::own(first.get());
  here.set_port(0);
  return OtherRank(options, lanes, std::move(first), listen_at(here)).join();
}

}  // namespace orlop

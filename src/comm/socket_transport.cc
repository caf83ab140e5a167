#include "comm/socket_transport.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "base/check.h"

namespace orlop {
namespace {

// System calls on one stream before the others have their turn.
constexpr int kCallsPerTurn = 8;
constexpr uint64_t kWoken = UINT64_MAX;  // marks the event of wake()

void watch(int events, int fd, uint32_t mask, uint64_t mark) {
  epoll_event event{.events = mask, .data = {.u64 = mark}};
  const bool added = ::epoll_ctl(events, EPOLL_CTL_ADD, fd, &event) == 0;
  check(added, ErrorCode::kCommunicator, "epoll_ctl: {}", errno_text(errno));
}

}  // namespace

SocketTransport::SocketTransport(const SocketOptions& options, int lanes)
    : rank_(options.rank),
      world_size_(options.world_size),
      lanes_(lanes),
      links_(index_of(options.world_size, 0)),
      events_(::epoll_create1(EPOLL_CLOEXEC)),
      woken_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  check(events_ && woken_, ErrorCode::kCommunicator, "epoll_create1, eventfd: {}",
        errno_text(errno));
  SocketLinks joined = join_by_sockets(options, lanes);
  for (int r = 0; r < world_size_; ++r) {
    for (int lane = 0; r != rank_ && lane < lanes_; ++lane) {
      Link& link = links_[index_of(r, lane)];
      link.fd = std::move(joined[static_cast<size_t>(r)][static_cast<size_t>(lane)]);
      watch(events_.get(), link.fd.get(), EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET,
            static_cast<uint64_t>(&link - links_.data()));
    }
  }
  watch(events_.get(), woken_.get(), EPOLLIN, kWoken);
}

size_t SocketTransport::index_of(int rank, int lane) const {
  return static_cast<size_t>(rank) * static_cast<size_t>(lanes_) + static_cast<size_t>(lane);
}

Transport::Request SocketTransport::start(Stream& stream, std::byte* data, size_t bytes) {
  if (free_.empty()) {
    free_.push_back(static_cast<Request>(slots_.size()));
    slots_.emplace_back();
  }
  const Request request = free_.back();
  free_.pop_back();
  slots_[static_cast<size_t>(request)] = {.next = data, .left = bytes, .stream = &stream};
  if (bytes > 0) stream.requests.push_back(request);
  return request;
}

Transport::Request SocketTransport::send(int to, int lane, const void* data, size_t bytes) {
  Link& link = links_[index_of(to, lane)];
  std::byte* first = static_cast<std::byte*>(const_cast<void*>(data));  // only read
  const Request request = start(link.out, first, bytes);
  write(link);
  return request;
}

Transport::Request SocketTransport::receive(int from, int lane, void* data, size_t bytes) {
  Link& link = links_[index_of(from, lane)];
  const Request request = start(link.in, static_cast<std::byte*>(data), bytes);
  read(link);
  return request;
}

bool SocketTransport::test(Request request) {
  Slot& slot = slots_[static_cast<size_t>(request)];
  ORLOP_INVARIANT(slot.stream != nullptr);
  if (slot.left > 0) return false;
  slot = {};
  free_.push_back(request);
  return true;
}

void SocketTransport::cancel(Request request) noexcept {
  Slot& slot = slots_[static_cast<size_t>(request)];
  if (slot.stream == nullptr) return;
  if (slot.left > 0) {
    // Its bytes would be missing in the stream: nothing after them can be told apart.
    slot.stream->is_over = true;
    std::erase(slot.stream->requests, request);
  }
  slot = {};
  free_.push_back(request);
}

void SocketTransport::advance(Stream& stream, size_t bytes) {
  Slot& slot = slots_[static_cast<size_t>(stream.requests.front())];
  slot.next += bytes;
  slot.left -= bytes;
  if (slot.left == 0) stream.requests.pop_front();
}

void SocketTransport::read(Link& link) {
  Stream& in = link.in;
  for (int calls = 0; in.is_ready && !in.is_over && !in.requests.empty(); ++calls) {
    if (calls == kCallsPerTurn) return;
    const Slot& slot = slots_[static_cast<size_t>(in.requests.front())];
    const ssize_t got = ::recv(link.fd.get(), slot.next, slot.left, MSG_DONTWAIT);
    if (got > 0) {
      // Less than there was room for is all that there is, unless the end comes behind it.
      const size_t bytes = static_cast<size_t>(got);
      in.is_ready = bytes == slot.left || link.is_ending;
      advance(in, bytes);
    } else if (got < 0 && errno == EAGAIN) {
      in.is_ready = false;
    } else if (got == 0 || errno != EINTR) {
      in.is_over = true;
      link.lost = Clock::now();
    }
  }
}

void SocketTransport::write(Link& link) {
  Stream& out = link.out;
  for (int calls = 0; out.is_ready && !out.is_over && !out.requests.empty(); ++calls) {
    if (calls == kCallsPerTurn) return;
    const Slot& slot = slots_[static_cast<size_t>(out.requests.front())];
    const ssize_t sent = ::send(link.fd.get(), slot.next, slot.left, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0) {
      out.is_ready = static_cast<size_t>(sent) == slot.left;
      advance(out, static_cast<size_t>(sent));
    } else if (errno == EAGAIN) {
      out.is_ready = false;
    } else if (errno != EINTR) {
      out.is_over = true;  // the end of what comes from there tells the rest
    }
  }
}

bool SocketTransport::can_move() const {
  const auto can = [](const Stream& stream) {
    return stream.is_ready && !stream.is_over && !stream.requests.empty();
  };
  return std::any_of(links_.begin(), links_.end(),
                     [&](const Link& link) { return can(link.in) || can(link.out); });
}

void SocketTransport::wait(std::chrono::milliseconds longest, bool) {
  take_events(can_move() ? 0 : static_cast<int>(longest.count()));
  for (Link& link : links_) {
    write(link);
    read(link);
  }
}

void SocketTransport::take_events(int timeout_ms) {
  std::array<epoll_event, 64> events{};
  const int count =
      ::epoll_wait(events_.get(), events.data(), static_cast<int>(events.size()), timeout_ms);
  check(count >= 0 || errno == EINTR, ErrorCode::kCommunicator, "epoll_wait: {}",
        errno_text(errno));
  for (int i = 0; i < count; ++i) {
    const epoll_event& event = events[static_cast<size_t>(i)];
    if (event.data.u64 == kWoken) {
      eventfd_t unused = 0;
      ::eventfd_read(woken_.get(), &unused);
      continue;
    }
    Link& link = links_[event.data.u64];
    if ((event.events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) link.is_ending = true;
    if ((event.events & EPOLLOUT) != 0) link.out.is_ready = true;
    if ((event.events & EPOLLIN) != 0 || link.is_ending) link.in.is_ready = true;
  }
}

void SocketTransport::wake() noexcept { ::eventfd_write(woken_.get(), 1); }

std::optional<Transport::Clock::time_point> SocketTransport::lost_since(int rank, int lane) const {
  return links_[index_of(rank, lane)].lost;
}

}  // namespace orlop

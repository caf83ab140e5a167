#include "comm/socket_address.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/check.h"

namespace orlop {
namespace {

constexpr int kNonBlocking = SOCK_NONBLOCK | SOCK_CLOEXEC;

template <typename GetName>
SocketAddress address_by(GetName get_name, int fd, const char* call) {
  sockaddr_storage storage{};
  socklen_t bytes = sizeof storage;
  const bool known = get_name(fd, reinterpret_cast<sockaddr*>(&storage), &bytes) == 0;
  check(known, ErrorCode::kCommunicator, "{}: {}", call, errno_text(errno));
  return {reinterpret_cast<const sockaddr*>(&storage), bytes};
}

// Milliseconds for poll(2), rounded up; 0 when the deadline has passed.
int poll_timeout(SocketClock::time_point deadline) {
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(deadline - SocketClock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 3'600'000));
}

void set_option(int fd, int level, int option, int value) {
  ::setsockopt(fd, level, option, &value, sizeof value);
}

}  // namespace

SocketAddress::SocketAddress(const sockaddr* address, socklen_t bytes)
    : bytes_(std::min(bytes, static_cast<socklen_t>(sizeof storage_))) {
  std::memcpy(&storage_, address, bytes_);
}

SocketAddress SocketAddress::own(int fd) { return address_by(::getsockname, fd, "getsockname"); }
SocketAddress SocketAddress::peer(int fd) { return address_by(::getpeername, fd, "getpeername"); }

uint16_t SocketAddress::port() const {
  return ntohs(family() == AF_INET6 ? reinterpret_cast<const sockaddr_in6*>(&storage_)->sin6_port
                                    : reinterpret_cast<const sockaddr_in*>(&storage_)->sin_port);
}

void SocketAddress::set_port(uint16_t port) {
  (family() == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&storage_)->sin6_port
                        : reinterpret_cast<sockaddr_in*>(&storage_)->sin_port) = htons(port);
}

uint32_t SocketAddress::scope() const {
  if (family() != AF_INET6) return 0;
  return reinterpret_cast<const sockaddr_in6*>(&storage_)->sin6_scope_id;
}

void SocketAddress::set_scope(uint32_t scope) {
  if (family() == AF_INET6) reinterpret_cast<sockaddr_in6*>(&storage_)->sin6_scope_id = scope;
}

std::string SocketAddress::text() const {
  char host[NI_MAXHOST] = "?";
  ::getnameinfo(get(), bytes_, host, sizeof host, nullptr, 0, NI_NUMERICHOST);
  return family() == AF_INET6 ? fmt::format("[{}]:{}", host, port())
                              : fmt::format("{}:{}", host, port());
}

std::vector<SocketAddress> resolve(const std::string& host_and_port) {
  const size_t colon = host_and_port.rfind(':');
  std::string host = host_and_port.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  } else if (host.find_first_of("[]:") != std::string::npos) {
    host.clear();
  }
  const std::string port = colon == std::string::npos ? "" : host_and_port.substr(colon + 1);
  check(!host.empty() && !port.empty() && port.find_first_not_of("0123456789") == std::string::npos,
        ErrorCode::kUsage, "'{}' is no address; write host:port, or [address]:port for IPv6",
        host_and_port);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const int error = ::getaddrinfo(host.c_str(), port.c_str(), &hints, &list);
  check(error == 0, error == EAI_SERVICE ? ErrorCode::kUsage : ErrorCode::kCommunicator, "'{}': {}",
        host_and_port, ::gai_strerror(error));
  std::vector<SocketAddress> addresses;
  for (const addrinfo* info = list; info != nullptr; info = info->ai_next) {
    addresses.emplace_back(info->ai_addr, info->ai_addrlen);
  }
  ::freeaddrinfo(list);
  return addresses;
}

UniqueFd listen_at(const SocketAddress& address) {
  UniqueFd fd(::socket(address.family(), SOCK_STREAM | kNonBlocking, 0));
  check(static_cast<bool>(fd), ErrorCode::kCommunicator, "socket: {}", errno_text(errno));
  set_option(fd.get(), SOL_SOCKET, SO_REUSEADDR, 1);
  const bool listens =
      ::bind(fd.get(), address.get(), address.bytes()) == 0 && ::listen(fd.get(), SOMAXCONN) == 0;
  check(listens, ErrorCode::kCommunicator, "cannot listen at {}: {}", address.text(),
        errno_text(errno));
  return fd;
}

UniqueFd connect_to(const SocketAddress& address, SocketClock::time_point deadline) {
  UniqueFd fd(::socket(address.family(), SOCK_STREAM | kNonBlocking, 0));
  if (!fd) return fd;
  int error = ::connect(fd.get(), address.get(), address.bytes()) == 0 ? 0 : errno;
  if (error == EINPROGRESS || error == EINTR) {
    socklen_t bytes = sizeof error;
    if (!wait_for_socket(fd.get(), POLLOUT, deadline)) {
      error = ETIMEDOUT;
    } else if (::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &bytes) != 0) {
      error = errno;
    }
  }
  // While nobody listens at a port of this host that the kernel gives to clients, one of them may
  // be given that very port, and is then connected with itself.
  if (error == 0 && SocketAddress::own(fd.get()).text() == SocketAddress::peer(fd.get()).text()) {
    error = ECONNREFUSED;
  }
  if (error != 0) fd.reset();
  errno = error;
  return fd;
}

bool wait_for_socket(int fd, short events, SocketClock::time_point deadline) {
  for (;;) {
    pollfd waited{.fd = fd, .events = events, .revents = 0};
    const int ready = ::poll(&waited, 1, poll_timeout(deadline));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return true;  // the call that follows says what is wrong
    if (ready == 0 && SocketClock::now() >= deadline) return false;
  }
}

bool send_all(int fd, const void* data, size_t bytes, SocketClock::time_point deadline) {
  const std::byte* next = static_cast<const std::byte*>(data);
  while (bytes > 0) {
    const ssize_t sent = ::send(fd, next, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) {
      next += sent;
      bytes -= static_cast<size_t>(sent);
    } else if (errno == EAGAIN) {
      if (wait_for_socket(fd, POLLOUT, deadline)) continue;
      errno = ETIMEDOUT;
      return false;
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

bool receive_all(int fd, void* data, size_t bytes, SocketClock::time_point deadline) {
  std::byte* next = static_cast<std::byte*>(data);
  while (bytes > 0) {
    const ssize_t got = ::recv(fd, next, bytes, MSG_DONTWAIT);
    if (got > 0) {
      next += got;
      bytes -= static_cast<size_t>(got);
    } else if (got == 0) {
      errno = 0;
      return false;
    } else if (errno == EAGAIN) {
      if (wait_for_socket(fd, POLLIN, deadline)) continue;
      errno = ETIMEDOUT;
      return false;
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

}  // namespace orlop

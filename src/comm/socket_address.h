#pragma once

#include <sys/socket.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/unique_fd.h"

namespace orlop {

using SocketClock = std::chrono::steady_clock;

// An IPv4 or IPv6 address with a port.
class SocketAddress {
 public:
  SocketAddress() = default;
  SocketAddress(const sockaddr* address, socklen_t bytes);

  // Of this end of a socket, and of the other.
  static SocketAddress own(int fd);
  static SocketAddress peer(int fd);

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage_); }
  socklen_t bytes() const { return bytes_; }
  int family() const { return storage_.ss_family; }
  uint16_t port() const;
  void set_port(uint16_t port);
  // Which of this host's links leads to a link-local IPv6 address; 0 for every other address.
  uint32_t scope() const;
  void set_scope(uint32_t scope);
  // "192.0.2.1:4000", "[2001:db8::1]:4000"
  std::string text() const;

 private:
  sockaddr_storage storage_{};
  socklen_t bytes_ = 0;
};

// The addresses of "host:port" or "[IPv6]:port", by name or number. Throws Error(kUsage) when it is
// neither, Error(kCommunicator) when the name is unknown.
std::vector<SocketAddress> resolve(const std::string& host_and_port);

// A socket that listens; port 0 takes a free one. Does not block. Throws Error(kCommunicator).
UniqueFd listen_at(const SocketAddress& address);

// A connection, or none with errno set. Does not block from then on.
UniqueFd connect_to(const SocketAddress& address, SocketClock::time_point deadline);

// Waits until `events` of poll(2), an error or the deadline; false at the deadline.
bool wait_for_socket(int fd, short events, SocketClock::time_point deadline);

// All bytes, or false with errno set; at the deadline it is ETIMEDOUT, at the end of the stream 0.
bool send_all(int fd, const void* data, size_t bytes, SocketClock::time_point deadline);
bool receive_all(int fd, void* data, size_t bytes, SocketClock::time_point deadline);

}  // namespace orlop

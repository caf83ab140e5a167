#pragma once

#include <array>
#include <cstdint>
#include <list>
#include <optional>
#include <span>

#include "comm/socket_address.h"

namespace orlop {

// The first bytes of every connection between ranks, which say whose it is. Plain bytes, the same
// for every version of Orlop, so that versions that do not fit find out.
struct Hello {
  static constexpr uint64_t kMagic = 0x31706F6C726F2B72;
  static constexpr int32_t kNoLane = -1;  // a rank that comes to rank 0 to be told of the others

  uint64_t magic = kMagic;
  std::array<char, 32> version{};  // ends with 0
  int32_t rank = 0;
  int32_t world_size = 0;
  int32_t lane = kNoLane;
  uint16_t port = 0;  // where the rank listens for others; with kNoLane
  uint16_t unused = 0;
};

Hello make_hello(int rank, int world_size, int lane, uint16_t port);

// Takes connections and reads who they are, waiting for none in particular: who says something else
// or nothing is dropped.
class Reception {
 public:
  struct Guest {
    UniqueFd fd;
    Hello hello;
    SocketAddress address;
  };

  explicit Reception(UniqueFd listener) : listener_(std::move(listener)) {}

  SocketAddress address() const { return SocketAddress::own(listener_.get()); }

  // The next guest who has said hello; nothing at the deadline, or when one of `watched` is
  // readable, which it sets `readable` to.
  std::optional<Guest> next(SocketClock::time_point deadline, std::span<const int> watched,
                            std::optional<int>& readable);

 private:
  struct Stranger {
    Guest guest;
    size_t got = 0;  // bytes of its hello
    SocketClock::time_point since;
  };

  void accept_all();
  std::optional<Guest> hear(std::list<Stranger>::iterator stranger);

  UniqueFd listener_;
  std::list<Stranger> strangers_;
};

}  // namespace orlop

#pragma once

#include <deque>
#include <vector>

#include "base/unique_fd.h"
#include "comm/socket_rendezvous.h"
#include "comm/transport.h"

namespace orlop {

// Messages over TCP, one connection per pair of ranks and lane: a stream whose two ends know what
// comes next, so that nothing is buffered here, and a lane that is full holds no other lane up.
class SocketTransport final : public Transport {
 public:
  // Joins the ranks of `options`.
  SocketTransport(const SocketOptions& options, int lanes);

  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  Request send(int to, int lane, const void* data, size_t bytes) override;
  Request receive(int from, int lane, void* data, size_t bytes) override;
  bool test(Request request) override;
  void cancel(Request request) noexcept override;
  void wait(std::chrono::milliseconds longest, bool hurried) override;
  void wake() noexcept override;
  std::optional<Clock::time_point> lost_since(int rank, int lane) const override;
  void finish() override {}

 private:
  // One direction of a connection.
  struct Stream {
    std::deque<Request> requests;  // in their order
    bool is_ready = false;         // the last event says so, and no call since that it is not
    bool is_over = false;          // nothing more will move
  };
  struct Link {
    UniqueFd fd;
    Stream in;
    Stream out;
    bool is_ending = false;  // the other side has closed: what has arrived is still to be read
    std::optional<Clock::time_point> lost;
  };
  // What is left of a send or a receive.
  struct Slot {
    std::byte* next = nullptr;
    size_t left = 0;
    Stream* stream = nullptr;  // null: free
  };

  size_t index_of(int rank, int lane) const;
  Request start(Stream& stream, std::byte* data, size_t bytes);
  void read(Link& link);
  void write(Link& link);
  // Accounts for what a call has moved.
  void advance(Stream& stream, size_t bytes);
  bool can_move() const;
  void take_events(int timeout_ms);

  const int rank_;
  const int world_size_;
  const int lanes_;
  std::vector<Link> links_;  // (world_size, lanes)
  std::vector<Slot> slots_;
  std::vector<Request> free_;
  UniqueFd events_;  // of all connections and of wake()
  UniqueFd woken_;
};

}  // namespace orlop

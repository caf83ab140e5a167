#pragma once

#include <chrono>
#include <cstddef>
#include <optional>

namespace orlop {

// Carries bytes between the ranks of one run, on numbered lanes that do not mix. On a lane, what
// one rank sends to another arrives in order, and both call for it in the same order and sizes.
// Made and used by one thread; only wake() may be called by any.
class Transport {
 public:
  using Clock = std::chrono::steady_clock;

  // A send or a receive under way: its bytes belong to it until test() is true or cancel().
  using Request = int;

  Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;
  // What is under way is given up; nothing is read or written any more.
  virtual ~Transport() = default;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;

  virtual Request send(int to, int lane, const void* data, size_t bytes) = 0;
  virtual Request receive(int from, int lane, void* data, size_t bytes) = 0;

  // True when the bytes of a send may be reused, when those of a receive are there; the request is
  // over then. Does not wait.
  virtual bool test(Request request) = 0;

  // Gives a request up, unless it is over. As far as the transport allows, its bytes are not
  // touched any more; the lane between the two ranks is of no use from then on.
  virtual void cancel(Request request) noexcept = 0;

  // Sleeps until something of a request has moved, or wake(), or for `longest`; may return at once.
  // A transport that must look for itself looks often when the caller is `hurried`.
  virtual void wait(std::chrono::milliseconds longest, bool hurried) = 0;

  // Ends the present wait(), or else the next one.
  virtual void wake() noexcept = 0;

  // Since when it is known that beyond what has been received on this lane nothing will come from
  // `rank`: its process is gone, or the way to it has broken. Known where a receive is under way.
  virtual std::optional<Clock::time_point> lost_since(int rank, int lane) const = 0;

  // All ranks have parted in good order: nothing is under way between them.
  virtual void finish() = 0;
};

}  // namespace orlop

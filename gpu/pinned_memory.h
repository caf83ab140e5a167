#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

namespace orlop {

// The driver's two calls behind PinnedMemory. A refused one leaves no error behind for later calls.
struct PinCalls {
  std::function<std::string(void* address, size_t bytes)>
      pin;                                   // why it was refused; "": it is done
  std::function<void(void* address)> unpin;  // a range as it was pinned
};
PinCalls driver_pin_calls();

// Host memory that the driver knows, so that copies from and to it run asynchronously. The memory
// belongs to the caller and must outlive this object, which takes the registrations back. A range
// is registered in segments; no copy may cross from one to the next, hence for_each_piece().
// Thread-safe.
class PinnedMemory {
 public:
  // Tests give calls of their own.
  explicit PinnedMemory(PinCalls calls = driver_pin_calls());
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;
  ~PinnedMemory();

  // Page-aligned. All or nothing: throws Error(kOutOfMemory) with the amounts pinned before, asked
  // for and refused.
  void add(void* address, size_t bytes);

  // Calls piece(offset, bytes) for the parts of [host, host + bytes) that lie in one segment each,
  // in rising order. Memory that is not registered is one piece.
  template <typename Piece>
  void for_each_piece(const void* host, size_t bytes, Piece&& piece) const {
    const auto begin = reinterpret_cast<uintptr_t>(host);
    size_t offset = 0;
    while (offset < bytes) {
      const size_t part = piece_bytes(begin + offset, bytes - offset);
      piece(offset, part);
      offset += part;
    }
  }

  size_t bytes() const;

 private:
  struct Segment {
    uintptr_t begin;
    uintptr_t end;
  };

  size_t piece_bytes(uintptr_t begin, size_t bytes) const;
  void release(const std::vector<Segment>& segments) const noexcept;

  const PinCalls calls_;
  mutable std::mutex mutex_;
  std::vector<Segment> segments_;  // sorted, disjoint
};

}  // namespace orlop

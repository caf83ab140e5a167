#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace orlop {

// XXH3-64 (seed 0) of bytes that come in pieces: the value that `xxhsum -H3` prints for a file.
class Xxh3Stream {
 public:
  Xxh3Stream();
  ~Xxh3Stream();
  Xxh3Stream(Xxh3Stream&&) noexcept;
  Xxh3Stream& operator=(Xxh3Stream&&) noexcept;

  void update(std::span<const std::byte> bytes);
  uint64_t digest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace orlop

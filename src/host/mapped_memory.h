#pragma once

#include <cstddef>

namespace orlop::host {

// Owns one anonymous, page-aligned mapping; pages become real when they are first written.
class MappedMemory {
 public:
  MappedMemory() = default;
  // Throws Error(kOutOfMemory) that names `purpose` and the amount. 0 bytes map nothing.
  MappedMemory(size_t bytes, const char* purpose);
  MappedMemory(MappedMemory&& other) noexcept;
  MappedMemory& operator=(MappedMemory&& other) noexcept;
  ~MappedMemory();

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace orlop::host

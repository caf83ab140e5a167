#pragma once

#include <cstddef>

namespace orlop::bench {

// Anonymous memory on huge pages (as far as the system grants them), written once by all threads so
// that no page fault falls into a measurement. Starts on a 2 MiB boundary and holds zeros.
class HugeBuffer {
 public:
  HugeBuffer(size_t bytes, int threads);
  ~HugeBuffer();
  HugeBuffer(HugeBuffer&& other) noexcept;
  HugeBuffer(const HugeBuffer&) = delete;
  HugeBuffer& operator=(const HugeBuffer&) = delete;

  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t bytes() const { return bytes_; }

 private:
  void* mapping_ = nullptr;
  size_t mapping_bytes_ = 0;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace orlop::bench

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/bytes.h"
#include "orlop/types.h"

namespace orlop {

// Carves one device buffer into aligned regions. Regions whose lifetimes do not overlap share
// memory: rewind() gives back everything taken since mark(). Carved from null it only counts, so a
// block plans and runs with the same code. peak_bytes() is the most that was in use at once.
class Workspace {
 public:
  explicit Workspace(void* base) : base_(reinterpret_cast<uintptr_t>(base)) {}

  void* take_bytes(size_t bytes) {
    const size_t begin = used_;
    used_ += align_up(bytes, kDeviceAlignment);
    peak_ = std::max(peak_, used_);
    return reinterpret_cast<void*>(base_ + begin);
  }
  void* take(int64_t numel, DType dtype) {
    return take_bytes(static_cast<size_t>(numel) * dtype_bytes(dtype));
  }
  float* take_floats(int64_t numel) { return static_cast<float*>(take(numel, DType::kF32)); }

  size_t mark() const { return used_; }
  void rewind(size_t mark) { used_ = mark; }
  size_t peak_bytes() const { return peak_; }

 private:
  uintptr_t base_;
  size_t used_ = 0;
  size_t peak_ = 0;
};

// The element `numel` behind `base`.
inline void* element(void* base, int64_t numel, DType dtype) {
  return static_cast<char*>(base) +
         static_cast<ptrdiff_t>(numel) * static_cast<ptrdiff_t>(dtype_bytes(dtype));
}
inline const void* element(const void* base, int64_t numel, DType dtype) {
  return static_cast<const char*>(base) +
         static_cast<ptrdiff_t>(numel) * static_cast<ptrdiff_t>(dtype_bytes(dtype));
}

}  // namespace orlop

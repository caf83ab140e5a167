#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>

#include "base/bytes.h"
#include "base/check.h"

namespace orlop::nvme {

// Zeroed memory for direct I/O outside the step: superblocks, tables, measurements. From 2 MiB on
// it asks for huge pages, as the arena does: drives take fewer segments per request then.
class AlignedMemory {
 public:
  // `alignment` is a power of two. Throws Error(kOutOfMemory).
  AlignedMemory(size_t bytes, size_t alignment) : bytes_(bytes) {
    const bool huge = bytes >= kHugePageBytes;
    if (huge) alignment = std::max(alignment, kHugePageBytes);
    const size_t taken = align_up(bytes, alignment);
    memory_.reset(static_cast<std::byte*>(std::aligned_alloc(alignment, taken)));
    check(memory_ != nullptr || bytes == 0, ErrorCode::kOutOfMemory, "no memory for {} bytes",
          bytes);
    if (huge) ::madvise(memory_.get(), taken, MADV_HUGEPAGE);
    if (bytes > 0) std::memset(memory_.get(), 0, bytes);
  }

  std::byte* data() const { return memory_.get(); }
  std::span<std::byte> span() const { return {memory_.get(), bytes_}; }

 private:
  static constexpr size_t kHugePageBytes = 2 * kMiB;

  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  size_t bytes_;
  std::unique_ptr<std::byte, Free> memory_;
};

}  // namespace orlop::nvme

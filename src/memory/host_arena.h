#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/bytes.h"

namespace orlop {

inline constexpr size_t kPageBytes = 4096;

struct PurposeBytes {
  std::string purpose;
  size_t bytes = 0;
};

// The one piece of host memory that holds heavy state: an anonymous mapping, page-aligned, advised
// to use huge pages, first touched by all cores in parallel, kept out of forked children and core
// dumps. Its capacity is the budget: carving beyond it is refused, and nothing is rounded up to a
// power of two. Carved once while the engine is built, by one thread; given back as a whole.
class HostArena {
 public:
  // Takes and touches `capacity_bytes`, rounded up to whole pages; all bytes are zero. Throws
  // Error(kDoesNotFit), before anything is taken, when the machine or the process's control group
  // has less to give, and Error(kOutOfMemory) when the system refuses the mapping.
  explicit HostArena(size_t capacity_bytes);
  ~HostArena();
  HostArena(const HostArena&) = delete;
  HostArena& operator=(const HostArena&) = delete;

  // The next `bytes` of the arena; pieces follow each other in the order of the calls. `alignment`
  // is a power of two of at most kPageBytes: kDeviceAlignment for buffers that are copied,
  // kPageBytes for direct I/O. Throws Error(kDoesNotFit) with what was asked, what is left and who
  // holds the rest.
  std::span<std::byte> carve(size_t bytes, std::string_view purpose,
                             size_t alignment = kDeviceAlignment);

  // Makes the arena known to a device or a ring: calls `register_range(address, bytes)` for
  // consecutive page-aligned pieces of at most `max_piece_bytes` (a multiple of kPageBytes) that
  // cover it.
  using RegisterRange = std::function<void(void* address, size_t bytes)>;
  void register_with(const RegisterRange& register_range,
                     size_t max_piece_bytes = SIZE_MAX / kPageBytes * kPageBytes) const;

  std::byte* data() const { return base_; }
  size_t capacity_bytes() const { return capacity_; }
  size_t used_bytes() const { return used_; }
  size_t free_bytes() const { return capacity_ - used_; }

  // Bytes by purpose in the order of the first carve; gaps left by alignment count as "alignment".
  // The sum is used_bytes().
  const std::vector<PurposeBytes>& report() const { return report_; }

 private:
  void count(std::string_view purpose, size_t bytes);

  std::byte* base_ = nullptr;
  size_t capacity_ = 0;
  size_t used_ = 0;
  std::vector<PurposeBytes> report_;
};

}  // namespace orlop

#include "bench/support/huge_buffer.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>

#include "base/bytes.h"
#include "base/check.h"

namespace orlop::bench {
namespace {

constexpr size_t kHugePageBytes = 2 * kMiB;

}  // namespace

HugeBuffer::HugeBuffer(size_t bytes, int threads) : bytes_(bytes) {
  mapping_bytes_ = align_up(bytes, kHugePageBytes) + kHugePageBytes;
  mapping_ =
      mmap(nullptr, mapping_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  check(mapping_ != MAP_FAILED, ErrorCode::kOutOfMemory, "mmap of {}: {}", format_bytes(bytes),
        errno_text(errno));
  const auto address = reinterpret_cast<uintptr_t>(mapping_);
  data_ = static_cast<char*>(mapping_) + (align_up(address, kHugePageBytes) - address);
  madvise(data_, align_up(bytes, kHugePageBytes), MADV_HUGEPAGE);
  const auto pages = static_cast<int64_t>(align_up(bytes, kHugePageBytes) / kHugePageBytes);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t page = 0; page < pages; ++page) {
    std::memset(static_cast<char*>(data_) + page * static_cast<int64_t>(kHugePageBytes), 0,
                kHugePageBytes);
  }
}

HugeBuffer::~HugeBuffer() {
  if (mapping_ != nullptr) munmap(mapping_, mapping_bytes_);
}

HugeBuffer::HugeBuffer(HugeBuffer&& other) noexcept
    : mapping_(std::exchange(other.mapping_, nullptr)),
      mapping_bytes_(other.mapping_bytes_),
      data_(other.data_),
      bytes_(other.bytes_) {}

}  // namespace orlop::bench

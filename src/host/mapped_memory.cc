#include "host/mapped_memory.h"

#include <sys/mman.h>

#include <utility>

#include "base/check.h"

namespace orlop::host {

MappedMemory::MappedMemory(size_t bytes, const char* purpose) {
  if (bytes == 0) return;
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  check(data != MAP_FAILED, ErrorCode::kOutOfMemory, "{}: the system refused {} bytes: {}", purpose,
        bytes, errno_text(errno));
  data_ = data;
  bytes_ = bytes;
  // Only advice: without huge pages everything works, a little slower.
  madvise(data_, bytes_, MADV_HUGEPAGE);
}

MappedMemory::MappedMemory(MappedMemory&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

MappedMemory& MappedMemory::operator=(MappedMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

MappedMemory::~MappedMemory() {
  if (data_) munmap(data_, bytes_);
}

}  // namespace orlop::host

#include "gpu/pinned_memory.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <utility>

#include "base/bytes.h"
#include "base/check.h"
#include "gpu/cuda_check.h"

namespace orlop {
namespace {

// Drivers refuse single registrations beyond limits of their own; a refused segment is tried again
// in halves down to the smallest.
constexpr size_t kLargestSegment = 16 * kGiB;
constexpr size_t kSmallestSegment = 64 * kMiB;
constexpr size_t kPage = 4096;

}  // namespace

PinCalls driver_pin_calls() {
  return {
      .pin =
          [](void* address, size_t bytes) {
            const cudaError_t result =
                cudaHostRegister(address, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
            if (result == cudaSuccess) return std::string();
            static_cast<void>(cudaGetLastError());
            return fmt::format("{}: {}", cudaGetErrorName(result), cudaGetErrorString(result));
          },
      .unpin =
          [](void* address) { log_cuda_error(cudaHostUnregister(address), "cudaHostUnregister"); }};
}

PinnedMemory::PinnedMemory(PinCalls calls) : calls_(std::move(calls)) {}

PinnedMemory::~PinnedMemory() { release(segments_); }

void PinnedMemory::release(const std::vector<Segment>& segments) const noexcept {
  for (const Segment& segment : segments) calls_.unpin(reinterpret_cast<void*>(segment.begin));
}

void PinnedMemory::add(void* address, size_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  check(begin % kPage == 0 && bytes % kPage == 0, ErrorCode::kUsage,
        "pinning host memory: address {:#x} and {} bytes must be multiples of {}", begin, bytes,
        kPage);
  const size_t before = this->bytes();
  std::vector<Segment> added;
  size_t step = kLargestSegment;
  size_t done = 0;
  while (done < bytes) {
    const size_t part = std::min(step, bytes - done);
    const std::string refusal = calls_.pin(reinterpret_cast<void*>(begin + done), part);
    if (refusal.empty()) {
      added.push_back({begin + done, begin + done + part});
      done += part;
      continue;
    }
    if (part > kSmallestSegment) {
      step = align_up(part / 2, kPage);
      continue;
    }
    release(added);
    fail(ErrorCode::kOutOfMemory,
         "pinning host memory: {} asked for, {} of it pinned when the driver refused the next {} "
         "({}); {} were pinned before. Lower the host memory budget, so that states go to the "
         "device or to drives, or raise the limit of locked memory (ulimit -l, the container's or "
         "the virtual machine's limit)",
         format_bytes(bytes), format_bytes(done), format_bytes(part), refusal,
         format_bytes(before));
  }
  const std::lock_guard lock(mutex_);
  segments_.insert(segments_.end(), added.begin(), added.end());
  std::sort(segments_.begin(), segments_.end(),
            [](const Segment& a, const Segment& b) { return a.begin < b.begin; });
}

size_t PinnedMemory::piece_bytes(uintptr_t begin, size_t bytes) const {
  const std::lock_guard lock(mutex_);
  const auto next = std::upper_bound(
      segments_.begin(), segments_.end(), begin,
      [](uintptr_t address, const Segment& segment) { return address < segment.end; });
  if (next == segments_.end()) return bytes;
  // Either inside `next`, up to its end, or in front of it, up to its begin.
  const uintptr_t boundary = begin < next->begin ? next->begin : next->end;
  return std::min(bytes, static_cast<size_t>(boundary - begin));
}

size_t PinnedMemory::bytes() const {
  const std::lock_guard lock(mutex_);
  size_t sum = 0;
  for (const Segment& segment : segments_) sum += segment.end - segment.begin;
  return sum;
}

}  // namespace orlop

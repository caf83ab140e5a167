#include "memory/host_arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <thread>

#include "base/check.h"
#include "base/log.h"
#include "base/thread.h"
#include "memory/available_memory.h"

namespace orlop {
namespace {

constexpr size_t kHugePageBytes = 2 * kMiB;
// Below this many bytes per core another thread costs more than it saves.
constexpr size_t kTouchBytesPerThread = 64 * kMiB;

// Maps `bytes` at an address that is a multiple of the huge page, so that no huge page is lost at
// the ends; the excess of address space is given back.
std::byte* map_aligned(size_t bytes) {
  const size_t reserved = bytes + kHugePageBytes;
  void* const raw = ::mmap(nullptr, reserved, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) {
    fail(ErrorCode::kOutOfMemory,
         "host arena: the system refused to map {} ({} bytes): {}; see `ulimit -v` and "
         "vm.overcommit_memory, or lower the host budget",
         format_bytes(bytes), bytes, errno_text(errno));
  }
  const auto address = reinterpret_cast<uintptr_t>(raw);
  const size_t head = align_up(address, kHugePageBytes) - address;
  auto* const base = static_cast<std::byte*>(raw) + head;
  if (head > 0) ::munmap(raw, head);
  if (const size_t tail = reserved - head - bytes; tail > 0) ::munmap(base + bytes, tail);
  return base;
}

void advise(std::byte* base, size_t bytes, int advice, const char* name) {
  if (::madvise(base, bytes, advice) != 0) {
    log_info("host arena: madvise({}) was refused: {}", name, errno_text(errno));
  }
}

void touch_pages(std::byte* begin, std::byte* end) {
  for (std::byte* page = begin; page < end; page += kPageBytes) {
    *static_cast<volatile std::byte*>(page) = std::byte{0};
  }
}

// Every core takes an equal run of whole huge pages, so that the kernel zeroes them in parallel.
void touch_in_parallel(std::byte* base, size_t bytes) {
  const size_t cores = std::max<size_t>(1, std::thread::hardware_concurrency());
  const size_t count = std::clamp<size_t>(bytes / kTouchBytesPerThread, 1, cores);
  const size_t part = align_up((bytes + count - 1) / count, kHugePageBytes);
  std::vector<std::thread> threads;
  for (size_t begin = part; begin < bytes; begin += part) {
    threads.push_back(start_thread(
        "touch", [=] { touch_pages(base + begin, base + std::min(begin + part, bytes)); }));
  }
  touch_pages(base, base + std::min(part, bytes));
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

HostArena::HostArena(size_t capacity_bytes) {
  const size_t available = available_host_bytes();
  check(
      capacity_bytes <= available, ErrorCode::kDoesNotFit,
      "host arena: {} ({} bytes) asked, {} ({} bytes) available on this machine or in its control "
      "group; lower the host budget or move states to NVMe",
      format_bytes(capacity_bytes), capacity_bytes, format_bytes(available), available);
  const size_t capacity = align_up(capacity_bytes, kPageBytes);
  if (capacity == 0) return;
  base_ = map_aligned(capacity);
  capacity_ = capacity;
  advise(base_, capacity_, MADV_HUGEPAGE, "MADV_HUGEPAGE");
  advise(base_, capacity_, MADV_DONTFORK, "MADV_DONTFORK");
  advise(base_, capacity_, MADV_DONTDUMP, "MADV_DONTDUMP");
  touch_in_parallel(base_, capacity_);
}

HostArena::~HostArena() {
  if (base_ != nullptr) ::munmap(base_, capacity_);
}

std::span<std::byte> HostArena::carve(size_t bytes, std::string_view purpose, size_t alignment) {
  ORLOP_INVARIANT(std::has_single_bit(alignment) && alignment <= kPageBytes);
  const size_t begin = align_up(used_, alignment);
  if (begin > capacity_ || bytes > capacity_ - begin) {
    std::string holders;
    for (const PurposeBytes& entry : report_) {
      holders += fmt::format("{}{} {}", holders.empty() ? "" : ", ", entry.purpose,
                             format_bytes(entry.bytes));
    }
    fail(ErrorCode::kDoesNotFit,
         "host arena: {} needs {} ({} bytes), {} ({} bytes) of {} left (held: {}); raise the host "
         "budget",
         purpose, format_bytes(bytes), bytes, format_bytes(free_bytes()), free_bytes(),
         format_bytes(capacity_), holders.empty() ? "nothing" : holders);
  }
  if (begin > used_) count("alignment", begin - used_);
  count(purpose, bytes);
  used_ = begin + bytes;
  return {base_ + begin, bytes};
}

void HostArena::register_with(const RegisterRange& register_range, size_t max_piece_bytes) const {
  ORLOP_INVARIANT(max_piece_bytes > 0 && max_piece_bytes % kPageBytes == 0);
  for (size_t begin = 0; begin < capacity_;) {
    const size_t piece = std::min(max_piece_bytes, capacity_ - begin);
    register_range(base_ + begin, piece);
    begin += piece;
  }
}

void HostArena::count(std::string_view purpose, size_t bytes) {
  const auto entry = std::find_if(report_.begin(), report_.end(), [&](const PurposeBytes& known) {
    return known.purpose == purpose;
  });
  if (entry == report_.end()) {
    report_.push_back({std::string(purpose), bytes});
  } else {
    entry->bytes += bytes;
  }
}

}  // namespace orlop

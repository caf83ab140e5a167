#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/bytes.h"
#include "base/unique_fd.h"
#include "nvme/direct_io.h"
#include "nvme/io_queue.h"
#include "support.h"
#ifdef ORLOP_HAVE_URING
#include "nvme/uring_backend.h"
#endif

namespace orlop::nvme {
namespace {

class LargeTransfer : public ::testing::TestWithParam<IoEngine> {};

INSTANTIATE_TEST_SUITE_P(Engines, LargeTransfer,
                         ::testing::Values(IoEngine::kUring, IoEngine::kThreads),
                         [](const auto& info) { return engine_name(info.param); });

// Case S-05.
TEST_P(LargeTransfer, SingleTransfersBeyondTwoGiBAreComplete) {
  TempDir dir;
  const std::string path = dir / "data";
  const UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  enable_direct_io(fd.get());
  // A sparse file: pages of a marker at the start, at the limit of one system call and at the end.
  const size_t limit = 0x7ffff000;
  for (const size_t bytes : {2 * kGiB - 4096, 2 * kGiB, 2 * kGiB + 4096, 5 * kGiB}) {
    ORLOP_MAKE_BACKEND_OR_SKIP(real, GetParam(), 8);
    IoQueueOptions large;
    large.block_bytes = 8 * kMiB;
    large.depth = 8;
    IoQueue queue(std::move(real), large);
    ASSERT_EQ(::ftruncate(fd.get(), 0), 0);
    ASSERT_EQ(::ftruncate(fd.get(), static_cast<off_t>(bytes)), 0);
    AlignedMemory marker(4096, 4096);
    std::vector<size_t> places = {0, limit - 4096, bytes - 4096};
    if (bytes > limit) places.push_back(limit);
    for (const size_t place : places) {
      fill_pattern(marker.span(), place + 1);
      write_fully(fd.get(), marker.data(), 4096, place, path);
    }
    // Not touched before: only what the read puts there costs memory, and holes read as zeros.
    void* mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    ASSERT_NE(mapped, MAP_FAILED);
    const std::span<std::byte> data(static_cast<std::byte*>(mapped), bytes);
    const Completion<> read = start_transfer(queue, IoOp::kRead, fd.get(), 0, data);
    const bool failed = read.wait_error() != nullptr;
    EXPECT_FALSE(failed) << bytes;
    for (const size_t place : places) {
      EXPECT_TRUE(failed || has_pattern(data.subspan(place, 4096), place + 1))
          << bytes << " bytes, at " << place;
    }
    EXPECT_EQ(queue.stats().bytes_read, bytes);
    ::munmap(mapped, bytes);
  }
}

#ifdef ORLOP_HAVE_URING
// Case S-06.
TEST(RegisteredMemory, APoolOfThreeGiBIsRegisteredInPiecesThatNoSlotStraddles) {
  std::unique_ptr<UringBackend> backend;
  try {
    backend = std::make_unique<UringBackend>(8);
  } catch (const Error& error) {
    GTEST_SKIP() << error.what();
  }
  const size_t slot = 48 * kMiB;  // does not divide 1 GiB
  const size_t bytes = 64 * slot;
  void* mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(mapped, MAP_FAILED);
  const std::span<std::byte> pool(static_cast<std::byte*>(mapped), bytes);
  backend->register_buffer(pool, slot);
  if (backend->registered_buffers() == 0) GTEST_SKIP() << "the limit of locked memory is too low";
  EXPECT_EQ(backend->registered_buffers(), 4u);  // pieces of 21 slots, 1008 MiB

  TempDir dir;
  const std::string path = dir / "data";
  const UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  enable_direct_io(fd.get());
  IoQueue queue(std::move(backend), {});
  // The slots on both sides of the border between pieces, and the last one.
  for (const size_t index : {size_t{20}, size_t{21}, size_t{63}}) {
    const std::span<std::byte> data = pool.subspan(index * slot, slot);
    fill_pattern(data, index);
    start_transfer(queue, IoOp::kWrite, fd.get(), 0, data).wait();
    std::memset(data.data(), 0, slot);
    start_transfer(queue, IoOp::kRead, fd.get(), 0, data).wait();
    EXPECT_TRUE(has_pattern(data, index)) << "slot " << index;
  }
  queue.with_backend([&](IoBackend& io) { io.unregister_buffer(pool); });
  ::munmap(mapped, bytes);
}
#endif

}  // namespace
}  // namespace orlop::nvme

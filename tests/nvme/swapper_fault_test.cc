// Faults under the swapper: each ends in the same bytes or in one error that names operation,
// shard, path and offset, and every slot is back in its pool.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

#include "base/bytes.h"
#include "base/unique_fd.h"
#include "faulty_backend.h"
#include "mounts.h"
#include "nvme/direct_io.h"
#include "nvme/swapper.h"
#include "nvme/write_ledger.h"
#include "support.h"

namespace orlop::nvme {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr size_t kChunkBytes = 200'000;
constexpr size_t kSlotBytes = 256 * kKiB;
constexpr size_t kBlock = 64 * kKiB;

class SwapperFault : public ::testing::TestWithParam<IoEngine> {
 protected:
  SwapperFault() : memory_(8 * kSlotBytes, 4096), pool_("swap", memory_.span(), kSlotBytes) {}

  static SwapperOptions options(std::vector<std::string> directories, int32_t chunks = 4) {
    SwapperOptions made;
    made.directories = std::move(directories);
    made.bandwidths.assign(made.directories.size(), 1);
    for (int32_t i = 0; i < chunks; ++i) made.chunks.push_back({{i, 0}, kChunkBytes});
    made.verify = Verify::kFull;
    made.queue.block_bytes = kBlock;
    made.queue.depth = 8;
    return made;
  }
  // Empty where the machine has no io_uring.
  std::unique_ptr<IoBackend> backend(FaultPlan plan) {
    try {
      return std::make_unique<FaultyBackend>(make_io_backend(GetParam(), 8).backend,
                                             std::move(plan));
    } catch (const Error&) {
      return nullptr;
    }
  }
  void out(Swapper& swapper, int32_t shard, int64_t version) {
    SlotLease slot = pool_.acquire();
    fill_pattern(slot.span().first(kChunkBytes), seed(shard, version));
    swapper.swap_out({{shard, 0}, version, shard}, std::move(slot)).wait();
  }
  ::testing::AssertionResult in(Swapper& swapper, int32_t shard, int64_t version) {
    const SlotLease slot = swapper.swap_in({{shard, 0}, version, shard}, pool_.acquire()).wait();
    return has_pattern(slot.span().first(kChunkBytes), seed(shard, version));
  }
  static uint64_t seed(int32_t shard, int64_t version) {
    return static_cast<uint64_t>(shard * 1000 + version);
  }

  AlignedMemory memory_;
  SlotPool pool_;
};

#define ORLOP_SKIP_WITHOUT(backend) \
  if (!(backend)) GTEST_SKIP() << "this machine has no io_uring"

INSTANTIATE_TEST_SUITE_P(Engines, SwapperFault,
                         ::testing::Values(IoEngine::kUring, IoEngine::kThreads),
                         [](const auto& info) { return engine_name(info.param); });

TEST_P(SwapperFault, AFailedReadNamesEverythingAndCanBeTriedAgain) {
  TempDir dir;
  std::atomic<bool> broken{false};
  auto faulty = backend([&](const IoRequest& request, uint64_t) {
    const bool now = broken && request.op == IoOp::kRead && request.offset >= 4096 + kBlock;
    return now ? Fault::fail(EIO) : Fault::none();
  });
  ORLOP_SKIP_WITHOUT(faulty);
  Swapper swapper(options({dir.path()}), std::move(faulty));
  out(swapper, 0, 1);
  broken = true;
  EXPECT_THAT(error_of([&] { in(swapper, 0, 1); }),
              AllOf(HasSubstr("swap_in of shard 0 chunk 0 (version 1)"),
                    HasSubstr("read of 65536 bytes at offset 69632"),
                    HasSubstr(dir / "orlop-r0.swap"), HasSubstr("Input/output error")));
  EXPECT_EQ(pool_.in_use(), 0u);
  broken = false;
  EXPECT_TRUE(in(swapper, 0, 1));
  EXPECT_EQ(swapper.stats().failures, 1u);
}

TEST_P(SwapperFault, AfterAFailedWriteTheContentsAreLostUntilTheNextWrite) {
  for (const int error : {EIO, ENOSPC, EROFS}) {
    TempDir dir;
    std::atomic<bool> broken{false};
    auto faulty = backend([&](const IoRequest& request, uint64_t) {
      const bool now = broken && request.op == IoOp::kWrite && request.offset == 4096 + 2 * kBlock;
      return now ? Fault::fail(error) : Fault::none();
    });
    ORLOP_SKIP_WITHOUT(faulty);
    Swapper swapper(options({dir.path()}), std::move(faulty));
    out(swapper, 0, 1);
    broken = true;
    EXPECT_THAT(
        error_of([&] { out(swapper, 0, 2); }),
        AllOf(HasSubstr("swap_out of shard 0 chunk 0 (version 2)"),
              HasSubstr("at offset 135168 of " + dir.path()), HasSubstr(std::strerror(error)),
              HasSubstr(error == ENOSPC ? "are free" : "the file has")));
    EXPECT_EQ(pool_.in_use(), 0u);
    broken = false;
    for (const int64_t version : {1, 2}) {
      EXPECT_THAT(error_of([&] { in(swapper, 0, version); }),
                  AllOf(HasSubstr("contents are lost"), HasSubstr("swap_out"),
                        HasSubstr(std::strerror(error))));
    }
    EXPECT_THROW(swapper.flush(), Error);
    EXPECT_NO_THROW(swapper.flush());
    out(swapper, 0, 3);
    EXPECT_TRUE(in(swapper, 0, 3));
  }
}

TEST_P(SwapperFault, OperationsBehindAFailedWriteFailToo) {
  TempDir dir;
  auto faulty = backend([&](const IoRequest& request, uint64_t) {
    Fault fault = request.op == IoOp::kWrite ? Fault::fail(EIO) : Fault::none();
    fault.delay = milliseconds(20);
    return fault;
  });
  ORLOP_SKIP_WITHOUT(faulty);
  Swapper swapper(options({dir.path()}), std::move(faulty));
  const Completion<> write = swapper.swap_out({{1, 0}, 1, 0}, pool_.acquire());
  const Completion<SlotLease> read = swapper.swap_in({{1, 0}, 1, 0}, pool_.acquire());
  EXPECT_NE(write.wait_error(), nullptr);
  EXPECT_NE(read.wait_error(), nullptr);
  EXPECT_EQ(pool_.in_use(), 0u);
}

TEST_P(SwapperFault, StormsOfSmallFaultsChangeNoByte) {
  const Mount memory_mount = Mount::tmpfs(64);
  TempDir a, b, c;
  std::vector<std::vector<std::string>> places = {{a.path()}, {a.path(), b.path(), c.path()}};
  if (memory_mount.mounted()) places.push_back({memory_mount.path()});
  for (const auto& directories : places) {
    std::mt19937_64 random(directories.size());
    auto faulty = backend([random](const IoRequest& request, uint64_t) mutable {
      Fault fault;
      switch (random() % 6) {
        case 0:
          fault = Fault::fail(EINTR);
          break;
        case 1:
          fault = Fault::fail(EAGAIN);
          break;
        case 2:
          fault = Fault::cut(1 + random() % request.bytes);
          break;
        default:
          break;
      }
      fault.delay = std::chrono::microseconds(random() % 500);
      return fault;
    });
    ORLOP_SKIP_WITHOUT(faulty);
    std::mt19937_64 limits(5);
    static_cast<FaultyBackend&>(*faulty).limit_submissions(
        [limits](size_t) mutable { return static_cast<size_t>(limits() % 5); });
    Swapper swapper(options(directories, 12), std::move(faulty));
    for (int64_t version = 1; version <= 5; ++version) {
      for (int32_t shard = 0; shard < 12; ++shard) {
        SlotLease slot = pool_.acquire();
        fill_pattern(slot.span().first(kChunkBytes), seed(shard, version));
        swapper.swap_out({{shard, 0}, version, -shard}, std::move(slot));
      }
      for (int32_t shard = 0; shard < 12; ++shard) EXPECT_TRUE(in(swapper, shard, version));
    }
    EXPECT_NO_THROW(swapper.flush());
    EXPECT_GT(swapper.stats().retries, 0u);
    EXPECT_EQ(pool_.in_use(), 0u);
  }
}

// Case S-19: two weights of three and a half slots each, and two slots.
TEST_P(SwapperFault, TwoSlotsAreEnoughForAnyNumberOfChunks) {
  TempDir dir;
  std::mt19937_64 random(9);
  auto late = backend([random](const IoRequest&, uint64_t) mutable {
    return Fault::late(std::chrono::microseconds(random() % 1000));
  });
  ORLOP_SKIP_WITHOUT(late);
  auto chosen = options({dir.path()}, 0);
  for (const int32_t weight : {0, 1}) {
    for (const int32_t piece : {0, 1, 2, 3}) {
      chosen.chunks.push_back({{weight, piece}, piece < 3 ? kSlotBytes : kSlotBytes / 2});
    }
  }
  Swapper swapper(chosen, std::move(late));
  SlotPool two("two", memory_.span().first(2 * kSlotBytes), kSlotBytes);
  const auto seed_of = [](ChunkKey key, int64_t version) {
    return seed(10 * key.shard + key.chunk, version);
  };
  for (int64_t version = 1; version <= 10; ++version) {
    for (const auto& [key, bytes] : chosen.chunks) {
      SlotLease slot = two.acquire();
      if (version > 1) {
        slot = swapper.swap_in({key, version - 1, key.chunk}, std::move(slot)).wait();
        ASSERT_TRUE(has_pattern(slot.span().first(bytes), seed_of(key, version - 1)));
      }
      fill_pattern(slot.span().first(bytes), seed_of(key, version));
      swapper.swap_out({key, version, key.chunk}, std::move(slot));
    }
  }
  swapper.flush();
  EXPECT_EQ(two.in_use(), 0u);
}

TEST_P(SwapperFault, AFlippedBitOnTheWayIsFound) {
  for (const size_t byte : {size_t{0}, size_t{31'234}, size_t{65'535}}) {
    TempDir dir;
    std::atomic<bool> flip{false};
    auto faulty = backend([&](const IoRequest& request, uint64_t) {
      return flip && request.offset == 4096 + kBlock ? Fault::flip(byte) : Fault::none();
    });
    ORLOP_SKIP_WITHOUT(faulty);
    Swapper swapper(options({dir.path()}), std::move(faulty));
    out(swapper, 0, 1);
    flip = true;
    EXPECT_THAT(error_of([&] { in(swapper, 0, 1); }),
                AllOf(HasSubstr("swap_in of shard 0 chunk 0"), HasSubstr("checksum"),
                      HasSubstr("200000 bytes at offset 4096 of " + dir.path())));
    flip = false;
    EXPECT_TRUE(in(swapper, 0, 1));
  }
}

// Direct writes past the swapper, as a broken drive would do them.
class SwapFileEdit {
 public:
  explicit SwapFileEdit(const std::string& path)
      : path_(path), fd_(::open(path.c_str(), O_RDWR | O_CLOEXEC)) {}
  std::vector<std::byte> get(uint64_t offset, size_t bytes) const {
    std::vector<std::byte> data(bytes);
    read_fully(fd_.get(), data.data(), bytes, offset, path_);
    return data;
  }
  void put(uint64_t offset, std::span<const std::byte> data) const {
    write_fully(fd_.get(), data.data(), data.size(), offset, path_);
    ASSERT_EQ(::fsync(fd_.get()), 0);
  }
  void flip(uint64_t offset) const {
    auto byte = get(offset, 1);
    byte[0] ^= std::byte{0x10};
    put(offset, byte);
  }

 private:
  std::string path_;
  UniqueFd fd_;
};

TEST_P(SwapperFault, VerifyFindsWhatItPromises) {
  for (const Verify verify : {Verify::kOff, Verify::kSample, Verify::kFull}) {
    TempDir dir;
    auto real = backend([](const IoRequest&, uint64_t) { return Fault::none(); });
    ORLOP_SKIP_WITHOUT(real);
    auto chosen = options({dir.path()});
    chosen.verify = verify;
    Swapper swapper(chosen, std::move(real));
    const SwapFileEdit file(dir / "orlop-r0.swap");
    const auto found = [&](int64_t version) {
      const Completion<SlotLease> read = swapper.swap_in({{0, 0}, version, 0}, pool_.acquire());
      return read.wait_error() != nullptr;
    };
    out(swapper, 0, 1);
    EXPECT_FALSE(found(1));
    file.flip(4096);  // the first byte
    EXPECT_EQ(found(1), verify != Verify::kOff);
    file.flip(4096);
    file.flip(4096 + kChunkBytes - 1);  // the last byte
    EXPECT_EQ(found(1), verify != Verify::kOff);
    file.flip(4096 + kChunkBytes - 1);
    file.flip(4096 + 100'000);  // a byte that samples do not cover
    EXPECT_EQ(found(1), verify == Verify::kFull);
    file.flip(4096 + 100'000);
    file.flip(4096 + kChunkBytes);  // padding is no data
    EXPECT_FALSE(found(1));
    // A write that the drive acknowledged and lost: the old chunk is still there.
    const auto old = file.get(4096, kChunkBytes);
    out(swapper, 0, 2);
    file.put(4096, old);
    EXPECT_EQ(found(2), verify != Verify::kOff);
  }
}

// Case S-02; that the other ranks learn of it, AFaultOfOneRanksDriveEndsTheOthers shows.
TEST_P(SwapperFault, ASwapFileThatChangedItsLengthIsToldWithBothLengths) {
  for (const int change : {0, 1, 2}) {
    TempDir dir;
    auto real = backend([](const IoRequest&, uint64_t) { return Fault::none(); });
    ORLOP_SKIP_WITHOUT(real);
    Swapper swapper(options({dir.path()}), std::move(real));
    out(swapper, 0, 1);
    const std::string path = dir / "orlop-r0.swap";
    const auto bytes = static_cast<off_t>(std::filesystem::file_size(path));
    const off_t changed = change == 0 ? 0 : change == 1 ? bytes / 2 : bytes + 1;
    ASSERT_EQ(::truncate(path.c_str(), changed), 0);
    EXPECT_THAT(error_of([&] { in(swapper, 0, 1); }),
                AllOf(HasSubstr("swap_in of shard 0"), HasSubstr(path),
                      HasSubstr(std::to_string(changed) + " bytes, " + std::to_string(bytes))));
    EXPECT_THROW(out(swapper, 1, 1), Error);
    EXPECT_EQ(pool_.in_use(), 0u);
  }
}

TEST_P(SwapperFault, ADirectoryThatIsRemovedDoesNotStopTheRun) {
  auto dir = std::make_unique<TempDir>();
  auto real = backend([](const IoRequest&, uint64_t) { return Fault::none(); });
  ORLOP_SKIP_WITHOUT(real);
  Swapper swapper(options({dir->path()}), std::move(real));
  out(swapper, 0, 1);
  dir.reset();
  EXPECT_TRUE(in(swapper, 0, 1));
  out(swapper, 0, 2);
  EXPECT_TRUE(in(swapper, 0, 2));
}

// Case S-20.
TEST_P(SwapperFault, AnExceptionOfTheUserIsWhatIsSeenWhileSwapsAreInFlight) {
  TempDir dir;
  auto late = backend([](const IoRequest&, uint64_t) { return Fault::late(milliseconds(50)); });
  ORLOP_SKIP_WITHOUT(late);
  const auto begin = std::chrono::steady_clock::now();
  std::vector<Completion<>> writes;
  try {
    Swapper swapper(options({dir.path()}), std::move(late));
    for (int32_t i = 0; i < 8; ++i) {
      writes.push_back(swapper.swap_out({{i % 4, 0}, i, 0}, pool_.acquire()));
    }
    throw std::runtime_error("the loss is not a number");
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "the loss is not a number");
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  for (const auto& write : writes) EXPECT_TRUE(write.done());
  EXPECT_EQ(pool_.in_use(), 0u);
  EXPECT_FALSE(std::filesystem::exists(dir / "orlop-r0.swap"));
}

TEST_P(SwapperFault, ADriveThatHangsDoesNotHangTheEnd) {
  TempDir dir;
  auto started = std::make_shared<std::atomic<int>>(0);  // outlives the test with the backend
  auto stuck = backend([started](const IoRequest&, uint64_t) {
    ++*started;
    return Fault::late(milliseconds(2000));
  });
  ORLOP_SKIP_WITHOUT(stuck);
  auto chosen = options({dir.path()});
  chosen.queue.drain_limit = milliseconds(50);
  Completion<> write;
  auto begin = std::chrono::steady_clock::now();
  {
    Swapper swapper(chosen, std::move(stuck));
    write = swapper.swap_out({{0, 0}, 1, 0}, pool_.acquire());
    wait_for(*started, 1);
    begin = std::chrono::steady_clock::now();
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds(1500));
  EXPECT_EQ(pool_.in_use(), 1u) << "the drive still reads the slot";
  static_cast<void>(write.wait_error());
  EXPECT_EQ(pool_.in_use(), 0u);
}

// Case S-10.
TEST_P(SwapperFault, BadSlotsAreRefusedAtOnce) {
  const Mount drive = Mount::ext4(32, 512);
  ORLOP_SKIP_UNLESS_MOUNTED(drive);
  auto real = backend([](const IoRequest&, uint64_t) { return Fault::none(); });
  ORLOP_SKIP_WITHOUT(real);
  Swapper swapper(options({drive.path()}), std::move(real));
  for (const size_t shift : {size_t{1}, size_t{16}, size_t{256}}) {
    SlotPool shifted("shifted", memory_.span().subspan(shift, kSlotBytes), kSlotBytes);
    EXPECT_THAT(error_of([&] {
                  swapper.swap_out({{0, 0}, 1, 0}, shifted.acquire());
                }),
                AllOf(HasSubstr("swap_out of shard 0"), HasSubstr("not aligned to the 512 bytes")));
    EXPECT_EQ(shifted.in_use(), 0u);
  }
  SlotPool small("small", memory_.span(), 4096);
  EXPECT_THAT(error_of([&] {
                swapper.swap_out({{0, 0}, 1, 0}, small.acquire());
              }),
              HasSubstr("the slot has 4096 bytes, 200704 are needed"));
  EXPECT_THAT(error_of([&] {
                swapper.swap_out({{0, 0}, 1, 0}, SlotLease());
              }),
              HasSubstr("the slot has 0 bytes"));
  EXPECT_THAT(error_of([&] {
                swapper.swap_in({{99, 0}, 1, 0}, pool_.acquire());
              }),
              HasSubstr("shard 99 chunk 0"));
}

TEST_P(SwapperFault, TheCountOfADayHoldsOverRuns) {
  TempDir dir;
  auto real = backend([](const IoRequest&, uint64_t) { return Fault::none(); });
  auto again = backend([](const IoRequest&, uint64_t) { return Fault::none(); });
  ORLOP_SKIP_WITHOUT(real);
  auto chosen = options({dir.path()});
  chosen.keep_count_of_day = true;
  auto first = std::make_unique<Swapper>(chosen, std::move(real));
  Swapper& swapper = *first;
  swapper.begin_step();
  out(swapper, 0, 1);
  out(swapper, 1, 1);
  EXPECT_EQ(swapper.stats().step_bytes_written, 2 * align_up(kChunkBytes, 4096));
  swapper.begin_step();
  EXPECT_EQ(swapper.stats().step_bytes_written, 0u);
  EXPECT_EQ(swapper.stats().bytes_written, 2 * align_up(kChunkBytes, 4096));
  first.reset();
  const Swapper second(chosen, std::move(again));
  EXPECT_EQ(second.stats().bytes_written, 0u);
  EXPECT_EQ(second.stats().day_bytes_written, 2 * align_up(kChunkBytes, 4096));
}

// A run of fewer ranks goes on from what all ranks of the one before have written.
TEST(WriteLedger, TakesOverTheCountsOfRanksThatAreGone) {
  TempDir dir;
  for (const int rank : {0, 1, 2}) {
    WriteLedger ledger(dir.path(), rank, 3);
    ledger.add(100u << rank);
    ledger.save();
  }
  const auto today = [&](int rank, int world_size) {
    return WriteLedger(dir.path(), rank, world_size).bytes_today();
  };
  EXPECT_EQ(today(1, 3), 200u);
  EXPECT_EQ(today(0, 2), 100u + 400u);
  EXPECT_EQ(today(1, 2), 200u) << "taken once";
  EXPECT_EQ(today(0, 1), 700u);
  EXPECT_EQ(today(0, 1), 700u);
  std::ofstream(dir.path() + "/orlop-r1.writes") << "0 12345";
  std::ofstream(dir.path() + "/orlop-r2.writes") << "what is this";
  std::ofstream(dir.path() + "/orlop-rx.writes") << "not ours";
  EXPECT_EQ(today(0, 1), 700u) << "another day, and no count at all";
  EXPECT_TRUE(std::filesystem::exists(dir.path() + "/orlop-rx.writes"));
}

}  // namespace
}  // namespace orlop::nvme

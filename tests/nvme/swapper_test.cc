#include "nvme/swapper.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>

#include "base/bytes.h"
#include "faulty_backend.h"
#include "nvme/aio_sweep.h"
#include "nvme/drive_report.h"
#include "nvme/superblock.h"
#include "support.h"

namespace orlop::nvme {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr size_t kSlotBytes = 256 * kKiB;

struct Rig {
  explicit Rig(size_t slots, size_t slot_bytes = kSlotBytes)
      : memory(slots * slot_bytes, 4096), pool("swap", memory.span(), slot_bytes) {}
  AlignedMemory memory;
  SlotPool pool;
};

std::vector<ChunkSpec> equal_chunks(int32_t count, size_t bytes) {
  std::vector<ChunkSpec> chunks;
  for (int32_t i = 0; i < count; ++i) chunks.push_back({{i / 2, i % 2}, bytes});
  return chunks;
}

uint64_t seed_of(ChunkKey key, int64_t version) {
  return static_cast<uint64_t>(key.shard * 1000 + key.chunk) * 1000 +
         static_cast<uint64_t>(version);
}

class SwapperOnBackend : public ::testing::TestWithParam<IoEngine> {
 protected:
  SwapperOptions options(const std::vector<std::string>& directories,
                         std::vector<ChunkSpec> chunks) const {
    SwapperOptions made;
    made.directories = directories;
    made.chunks = std::move(chunks);
    made.engine = GetParam();
    made.queue.block_bytes = 64 * kKiB;
    made.queue.depth = 8;
    made.verify = Verify::kFull;
    return made;
  }
};

INSTANTIATE_TEST_SUITE_P(Engines, SwapperOnBackend,
                         ::testing::Values(IoEngine::kUring, IoEngine::kThreads),
                         [](const auto& info) { return engine_name(info.param); });

void write_chunk(Swapper& swapper, SlotPool& pool, const ChunkSpec& chunk, int64_t version) {
  SlotLease slot = pool.acquire();
  fill_pattern(slot.span().first(chunk.bytes), seed_of(chunk.key, version));
  swapper.swap_out({chunk.key, version, 0}, std::move(slot)).wait();
}

void expect_chunk(Swapper& swapper, SlotPool& pool, const ChunkSpec& chunk, int64_t version) {
  SlotLease slot = swapper.swap_in({chunk.key, version, 0}, pool.acquire()).wait();
  EXPECT_TRUE(has_pattern(slot.span().first(chunk.bytes), seed_of(chunk.key, version)))
      << "shard " << chunk.key.shard << " chunk " << chunk.key.chunk;
}

// Case S-01; that padding is no data, VerifyFindsWhatItPromises shows.
TEST_P(SwapperOnBackend, EverySizeComesBackBitForBit) {
  TempDir dir;
  std::vector<ChunkSpec> chunks;
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{511}, size_t{512}, size_t{513},
                             size_t{4095}, size_t{4096}, size_t{4097}, size_t{65535}, size_t{65536},
                             size_t{65537}, kMiB - 4, kMiB + 4, size_t{28'824'000}}) {
    chunks.push_back({{static_cast<int32_t>(chunks.size()), 0}, bytes});
  }
  ORLOP_MAKE_BACKEND_OR_SKIP(backend, GetParam(), 8);
  Swapper swapper(options({dir.path()}, chunks), std::move(backend));
  EXPECT_EQ(swapper.slot_bytes(), align_up(28'824'000, 4096));
  Rig rig(2, swapper.slot_bytes());
  swapper.register_memory(rig.memory.span(), swapper.slot_bytes());
  for (const ChunkSpec& chunk : chunks) write_chunk(swapper, rig.pool, chunk, 1);
  for (const ChunkSpec& chunk : chunks) expect_chunk(swapper, rig.pool, chunk, 1);
  EXPECT_EQ(rig.pool.in_use(), 0u);
  const SwapStats stats = swapper.stats();
  EXPECT_EQ(stats.swap_ins, chunks.size());
  EXPECT_EQ(stats.bytes_read, stats.bytes_written);
}

TEST_P(SwapperOnBackend, AReadOfAChunkWaitsForTheWriteBeforeIt) {
  TempDir dir;
  ORLOP_MAKE_BACKEND_OR_SKIP(real, GetParam(), 8);
  std::mt19937_64 random(1);
  auto backend = std::make_unique<FaultyBackend>(
      std::move(real), [random](const IoRequest&, uint64_t) mutable {
        return Fault::late(std::chrono::microseconds(random() % 2000));
      });
  const auto chunks = equal_chunks(4, 200'000);
  Swapper swapper(options({dir.path()}, chunks), std::move(backend));
  Rig rig(16);
  // Every chunk: write 1, read 1, write 2, read 2 at once, later ones with an earlier next use.
  std::vector<Completion<>> writes;
  std::vector<std::pair<Completion<SlotLease>, uint64_t>> reads;
  for (const ChunkSpec& chunk : chunks) {
    for (const int64_t version : {1, 2}) {
      SlotLease slot = rig.pool.acquire();
      fill_pattern(slot.span().first(chunk.bytes), seed_of(chunk.key, version));
      writes.push_back(swapper.swap_out({chunk.key, version, 10 - version}, std::move(slot)));
      reads.emplace_back(swapper.swap_in({chunk.key, version, -version}, rig.pool.acquire()),
                         seed_of(chunk.key, version));
    }
  }
  for (auto& write : writes) write.wait();
  for (auto& [read, seed] : reads) {
    SlotLease slot = read.wait();
    EXPECT_TRUE(has_pattern(slot.span().first(200'000), seed));
  }
}

// Case R-11.
TEST_P(SwapperOnBackend, ThousandCyclesWithFourSlotsReturnEverySlot) {
  TempDir dir;
  ORLOP_MAKE_BACKEND_OR_SKIP(real, GetParam(), 8);
  std::mt19937_64 random(7);
  auto backend = std::make_unique<FaultyBackend>(
      std::move(real), [random](const IoRequest& request, uint64_t) mutable {
        return request.op == IoOp::kWrite ? Fault::late(std::chrono::microseconds(random() % 300))
                                          : Fault::none();
      });
  const auto chunks = equal_chunks(8, 100'000);
  Swapper swapper(options({dir.path()}, chunks), std::move(backend));
  Rig rig(4);
  std::map<ChunkKey, int64_t> versions;
  for (int64_t cycle = 0; cycle < 1000; ++cycle) {
    const ChunkSpec& chunk = chunks[static_cast<size_t>(cycle) % chunks.size()];
    if (versions.contains(chunk.key)) {
      SlotLease slot =
          swapper.swap_in({chunk.key, versions[chunk.key], cycle}, rig.pool.acquire()).wait();
      ASSERT_TRUE(
          has_pattern(slot.span().first(chunk.bytes), seed_of(chunk.key, versions[chunk.key])));
    }
    SlotLease slot = rig.pool.acquire();
    fill_pattern(slot.span().first(chunk.bytes), seed_of(chunk.key, cycle));
    swapper.swap_out({chunk.key, cycle, cycle}, std::move(slot));
    versions[chunk.key] = cycle;
    if (cycle % 100 == 99) {
      swapper.flush();
      EXPECT_EQ(rig.pool.in_use(), 0u) << "after cycle " << cycle;
    }
  }
  EXPECT_EQ(swapper.stats().swap_outs, 1000u);
  EXPECT_EQ(swapper.stats().failures, 0u);
}

TEST_P(SwapperOnBackend, ADirectoryEachGetsBytesByBandwidth) {
  TempDir a, b, c;
  auto chosen = options({a.path(), b.path(), c.path()}, equal_chunks(60, 100'000));
  chosen.bandwidths = {3, 2, 1};
  ORLOP_MAKE_BACKEND_OR_SKIP(backend, GetParam(), 8);
  Swapper swapper(chosen, std::move(backend));
  ASSERT_EQ(swapper.drives().size(), 3u);
  EXPECT_EQ(swapper.drives()[0].bytes, 30 * align_up(100'000, 4096));
  EXPECT_EQ(swapper.drives()[1].bytes, 20 * align_up(100'000, 4096));
  EXPECT_EQ(swapper.drives()[2].bytes, 10 * align_up(100'000, 4096));
  Rig rig(4);
  for (const ChunkSpec& chunk : chosen.chunks) write_chunk(swapper, rig.pool, chunk, 5);
  for (const ChunkSpec& chunk : chosen.chunks) expect_chunk(swapper, rig.pool, chunk, 5);
}

TEST_P(SwapperOnBackend, MoreChunksComeBesideThoseThatAreThere) {
  TempDir one, two;
  Rig rig(2);
  std::vector<ChunkSpec> chunks = equal_chunks(6, 100000);
  const std::vector<ChunkSpec> later(chunks.begin() + 2, chunks.end());
  const auto chosen = options({one.path(), two.path()}, {chunks[0], chunks[1]});
  ORLOP_MAKE_BACKEND_OR_SKIP(backend, GetParam(), 8);
  Swapper swapper(chosen, std::move(backend));
  for (int i = 0; i < 2; ++i) write_chunk(swapper, rig.pool, chunks[static_cast<size_t>(i)], 1);
  swapper.add_chunks(later);
  for (const ChunkSpec& chunk : later) write_chunk(swapper, rig.pool, chunk, 2);
  for (size_t i = 0; i < chunks.size(); ++i) {
    expect_chunk(swapper, rig.pool, chunks[i], i < 2 ? 1 : 2);
  }
  EXPECT_EQ(swapper.drives()[0].bytes, swapper.drives()[1].bytes);
  // One that no drive can hold changes nothing.
  EXPECT_THAT(error_of([&] {
                swapper.add_chunks(std::vector{ChunkSpec{{9, 0}, size_t{1} << 50}});
              }),
              HasSubstr("bytes are missing"));
  EXPECT_THAT(error_of([&] { swapper.add_chunks(later); }), HasSubstr("twice"));
  for (size_t i = 0; i < chunks.size(); ++i) {
    expect_chunk(swapper, rig.pool, chunks[i], i < 2 ? 1 : 2);
  }
}

TEST_P(SwapperOnBackend, AVersionThatIsNotThereIsAnError) {
  TempDir dir;
  ORLOP_MAKE_BACKEND_OR_SKIP(backend, GetParam(), 8);
  const auto chunks = equal_chunks(2, 5000);
  Swapper swapper(options({dir.path()}, chunks), std::move(backend));
  Rig rig(1);
  EXPECT_THAT(error_of([&] {
                swapper.swap_in({{0, 0}, 1, 0}, rig.pool.acquire()).wait();
              }),
              AllOf(HasSubstr("swap_in of shard 0 chunk 0"), HasSubstr("never written")));
  write_chunk(swapper, rig.pool, chunks[0], 3);
  EXPECT_THAT(error_of([&] {
                swapper.swap_in({{0, 0}, 4, 0}, rig.pool.acquire()).wait();
              }),
              AllOf(HasSubstr("version 4"), HasSubstr("holds version 3")));
  EXPECT_EQ(rig.pool.in_use(), 0u);
  expect_chunk(swapper, rig.pool, chunks[0], 3);
}

TEST_P(SwapperOnBackend, DirectoriesOnOneDriveShareItEvenly) {
  TempDir a, b;
  ORLOP_MAKE_BACKEND_OR_SKIP(backend, GetParam(), 8);
  Swapper swapper(options({a.path(), b.path()}, equal_chunks(40, 100'000)), std::move(backend));
  for (const DriveInfo& drive : swapper.drives()) {
    EXPECT_EQ(drive.bandwidth, 0) << "nothing was measured";
    EXPECT_EQ(drive.bytes, 20 * align_up(100'000, 4096));
  }
}

TEST_P(SwapperOnBackend, BandwidthsAreMeasuredWhereNoneAreGiven) {
  TempDir a;
  TempDir b("/dev/shm");
  ORLOP_MAKE_BACKEND_OR_SKIP(backend, GetParam(), 8);
  const auto chunks = equal_chunks(40, 100'000);
  Swapper swapper(options({a.path(), b.path()}, chunks), std::move(backend));
  uint64_t bytes = 0;
  for (const DriveInfo& drive : swapper.drives()) {
    EXPECT_GT(drive.bandwidth, 0);
    EXPECT_GT(drive.bytes, 0u);
    bytes += drive.bytes;
  }
  EXPECT_EQ(bytes, 40 * align_up(100'000, 4096));
  Rig rig(2);
  for (const ChunkSpec& chunk : chunks) write_chunk(swapper, rig.pool, chunk, 1);
  for (const ChunkSpec& chunk : chunks) expect_chunk(swapper, rig.pool, chunk, 1);
}

TEST_P(SwapperOnBackend, AKeptFileListsItsChunks) {
  TempDir dir;
  auto chosen = options({dir.path()}, equal_chunks(3, 10'000));
  chosen.keep = true;
  {
    ORLOP_MAKE_BACKEND_OR_SKIP(backend, GetParam(), 8);
    Swapper swapper(chosen, std::move(backend));
    Rig rig(1);
    write_chunk(swapper, rig.pool, chosen.chunks[0], 4);
    write_chunk(swapper, rig.pool, chosen.chunks[2], 5);
  }
  const ShardFileInfo info = inspect_shard_file(dir / "orlop-r0.swap");
  ASSERT_EQ(info.records.size(), 3u);
  EXPECT_EQ(info.records[0].version, 4);
  EXPECT_EQ(info.records[1].version, -1);
  EXPECT_EQ(info.records[2].version, 5);
  EXPECT_EQ(info.records[2].bytes, 10'000u);
  EXPECT_EQ(info.records[2].offset, 4096 + 2 * align_up(10'000, 4096));
  EXPECT_NE(info.records[2].checksum, 0u);
}

TEST(Sweep, MeasuresEveryPointAndPicksOneOfThem) {
  TempDir dir;
  SweepOptions sweep;
  sweep.directory = dir.path();
  sweep.file_bytes = 8 * kMiB;
  sweep.block_bytes = {256 * kKiB, kMiB};
  sweep.depths = {2, 8};
  const SweepResult result = sweep_aio(sweep);
  ASSERT_EQ(result.points.size(), 4u);
  double fastest = 0;
  const auto rate = [](const SweepPoint& point) {
    return 2 / (1 / point.read_gib_per_s + 1 / point.write_gib_per_s);
  };
  for (const SweepPoint& point : result.points) {
    EXPECT_GT(point.read_gib_per_s, 0);
    EXPECT_GT(point.write_gib_per_s, 0);
    fastest = std::max(fastest, rate(point));
  }
  EXPECT_GE(rate(result.best), 0.97 * fastest);
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

TEST(DriveReport, TellsFileSystemSpaceAndDirectIo) {
  TempDir dir;
  const DriveReport report = report_drive(dir.path());
  EXPECT_EQ(report.directory, dir.path());
  EXPECT_FALSE(report.file_system.empty());
  EXPECT_GT(report.total_bytes, report.free_bytes);
  EXPECT_EQ(report.direct, report.why_not_direct.empty());
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
  EXPECT_THAT(error_of([&] { report_drive(dir / "none"); }),
              AllOf(HasSubstr(dir / "none"), HasSubstr("No such file")));
  const IoReport io = report_io();
  EXPECT_EQ(io.engine == "io_uring", io.reason.empty());
}

}  // namespace
}  // namespace orlop::nvme

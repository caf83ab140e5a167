#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

#include "base/bytes.h"
#include "base/unique_fd.h"
#include "mounts.h"
#include "orlop/swapper.h"
#include "support.h"
#include "tests/support/sanitized.h"

namespace orlop {
namespace {

using nvme::AlignedMemory;
using nvme::error_of;
using nvme::fill_pattern;
using nvme::has_pattern;
using nvme::Mount;
using nvme::TempDir;
using test::kSanitized;
using ::testing::AllOf;
using ::testing::HasSubstr;

// Engine, and whether to go past the page cache.
class AsyncFileOnBackend : public ::testing::TestWithParam<std::tuple<const char*, bool>> {
 protected:
  AsyncFileOptions options() const {
    AsyncFileOptions made;
    made.engine = std::get<0>(GetParam());
    made.direct = std::get<1>(GetParam());
    made.block_bytes = 64 * kKiB;
    made.queue_depth = 8;
    return made;
  }
};

INSTANTIATE_TEST_SUITE_P(Engines, AsyncFileOnBackend,
                         ::testing::Combine(::testing::Values("auto", "threads"),
                                            ::testing::Bool()),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param)) +
                                  (std::get<1>(info.param) ? "_direct" : "_buffered");
                         });

// Cases S-01 and S-10: past the page cache and through it; the file is as long as what was written.
TEST_P(AsyncFileOnBackend, EverySizeAndEveryAlignmentComesBack) {
  TempDir dir;
  AsyncFile files(options());
  for (const size_t bytes :
       {size_t{0}, size_t{1}, size_t{511}, size_t{512}, size_t{513}, size_t{4095}, size_t{4096},
        size_t{4097}, kMiB - 4, kMiB + 4, size_t{kSanitized ? 2'824'000 : 28'824'000}}) {
    for (const size_t shift : {size_t{0}, size_t{1}, size_t{16}, size_t{512}}) {
      if (bytes > 2 * kMiB && shift > 1) continue;
      const std::string path = dir / "data";
      std::filesystem::remove(path);
      AlignedMemory memory(bytes + shift, 4096);
      const std::span<std::byte> data = memory.span().subspan(shift);
      fill_pattern(data, bytes);
      EXPECT_EQ(files.write(data.data(), bytes, path, true), 1u);
      EXPECT_EQ(std::filesystem::file_size(path), bytes);
      std::fill(data.begin(), data.end(), std::byte{0});
      EXPECT_EQ(files.read(data.data(), bytes, path, true), 1u);
      EXPECT_TRUE(has_pattern(data, bytes)) << bytes << " bytes at +" << shift;
    }
  }
}

// Case S-10.
TEST_P(AsyncFileOnBackend, OffsetsNeedNoAlignmentAndNothingAroundChanges) {
  TempDir dir;
  AsyncFile files(options());
  const std::string path = dir / "data";
  AlignedMemory whole(100'000, 4096);
  fill_pattern(whole.span(), 1);
  files.sync_pwrite(whole.data(), 100'000, path);
  for (const uint64_t offset : {1u, 16u, 512u, 4096u, 4097u}) {
    AlignedMemory part(20'000, 4096);
    fill_pattern(part.span(), offset);
    files.sync_pwrite(part.data(), 20'000, path, offset);
    std::memcpy(whole.data() + offset, part.data(), 20'000);
    AlignedMemory back(100'000, 4096);
    files.sync_pread(back.data(), 100'000, path);
    EXPECT_EQ(std::memcmp(back.data(), whole.data(), 100'000), 0) << "offset " << offset;
  }
  EXPECT_EQ(std::filesystem::file_size(path), 100'000u);
}

TEST_P(AsyncFileOnBackend, ManyAsyncCallsAreCountedByOneWait) {
  TempDir dir;
  AsyncFile files(options());
  AlignedMemory memory(40 * 10'000, 4096);
  fill_pattern(memory.span(), 3);
  for (size_t i = 0; i < 40; ++i) {
    EXPECT_EQ(files.async_pwrite(memory.data() + i * 10'000, 10'000, dir / std::to_string(i)), 0u);
  }
  EXPECT_EQ(files.wait(), 40u);
  EXPECT_EQ(files.wait(), 0u);
  AlignedMemory back(40 * 10'000, 4096);
  for (size_t i = 0; i < 40; ++i) {
    files.async_pread(back.data() + i * 10'000, 10'000, dir / std::to_string(i));
  }
  EXPECT_EQ(files.wait(), 40u);
  EXPECT_TRUE(has_pattern(back.span(), 3));
}

TEST_P(AsyncFileOnBackend, AnErrorComesAfterAllCallsHaveEndedAndIsGoneAfterwards) {
  TempDir dir;
  AsyncFile files(options());
  AlignedMemory memory(16 * 8192, 4096);
  fill_pattern(memory.span(), 4);
  files.sync_pwrite(memory.data(), 16 * 8192, dir / "data");
  AlignedMemory back(16 * 8192, 4096);
  for (size_t i = 0; i < 16; ++i) {
    const uint64_t offset = i == 5 ? 16 * 8192 - 4096 : i * 8192;  // one reaches past the end
    files.async_pread(back.data() + i * 8192, 8192, dir / "data", offset);
  }
  EXPECT_THAT(error_of([&] { files.wait(); }),
              AllOf(HasSubstr("read of 8192 bytes at offset 126976"), HasSubstr(dir / "data"),
                    HasSubstr("met the end of the file"), HasSubstr("131072 bytes")));
  std::fill(back.span().begin(), back.span().end(), std::byte{0});
  for (size_t i = 0; i < 16; ++i) {
    files.async_pread(back.data() + i * 8192, 8192, dir / "data", i * 8192);
  }
  EXPECT_EQ(files.wait(), 16u);
  EXPECT_TRUE(has_pattern(back.span(), 4));
}

TEST_P(AsyncFileOnBackend, WorksOnAnOpenFileAndInLockedMemory) {
  TempDir dir;
  AsyncFile files(options());
  const UniqueFd fd(::open((dir / "data").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  auto* const memory = static_cast<std::byte*>(files.new_cpu_locked_tensor(300'000));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(memory) % files.alignment(), 0u);
  fill_pattern({memory, 300'000}, 5);
  files.async_pwrite(memory, 300'000, fd.get(), 0);
  EXPECT_EQ(files.wait(), 1u);
  std::memset(memory, 0, 300'000);
  files.async_pread(memory, 300'000, fd.get(), 0);
  EXPECT_EQ(files.wait(), 1u);
  EXPECT_TRUE(has_pattern({memory, 300'000}, 5));
  files.free_cpu_locked_tensor(memory);
  EXPECT_THAT(error_of([&] { files.free_cpu_locked_tensor(memory); }),
              HasSubstr("not from new_cpu_locked_tensor"));
}

TEST_P(AsyncFileOnBackend, ValidationFindsAFileThatDiffers) {
  TempDir dir;
  AsyncFile files(options());
  AlignedMemory memory(50'000, 4096);
  fill_pattern(memory.span(), 6);
  // Two validated writes of different bytes to one place: one of them must find the other's.
  AlignedMemory other(50'000, 4096);
  fill_pattern(other.span(), 7);
  files.pwrite(memory.data(), 50'000, dir / "data", true, true);
  files.pwrite(other.data(), 50'000, dir / "data", true, true);
  EXPECT_THAT(error_of([&] { files.wait(); }),
              AllOf(HasSubstr("write of 50000 bytes"), HasSubstr("of the file is 0x")));
  EXPECT_EQ(files.wait(), 0u);
}

TEST(AsyncFile, NamesWhatIsWrongWithAPath) {
  TempDir dir;
  AsyncFile files;
  std::byte buffer[16]{};
  EXPECT_THAT(error_of([&] { files.read(buffer, 16, dir / "none"); }),
              AllOf(HasSubstr(dir / "none"), HasSubstr("No such file")));
  EXPECT_THAT(error_of([&] { files.write(buffer, 16, dir.path()); }),
              AllOf(HasSubstr(dir.path()), HasSubstr("Is a directory")));
}

TEST(AsyncFile, AFullDiskInTheMiddleIsToldWithTheFreeBytes) {
  const Mount mount = Mount::ext4(32, 512);
  ORLOP_SKIP_UNLESS_MOUNTED(mount);
  AsyncFile files;
  AlignedMemory memory(48 * kMiB, 4096);
  const std::string path = mount.path() + "/data";
  EXPECT_THAT(error_of([&] { files.write(memory.data(), 48 * kMiB, path); }),
              AllOf(HasSubstr("write of 50331648 bytes at offset 0"), HasSubstr(path),
                    HasSubstr("No space left on device"), HasSubstr("free")));
  std::filesystem::remove(path);
  fill_pattern(memory.span(), 7);
  EXPECT_EQ(files.write(memory.data(), 10 * kMiB, path, true), 1u);
}

TEST(AsyncFile, WorksOnTmpfsAndOverlay) {
  const Mount memory_mount = Mount::tmpfs(8);
  const Mount overlay = Mount::overlay();
  for (const Mount* mount : {&memory_mount, &overlay}) {
    if (!mount->mounted()) continue;
    AsyncFile files;
    AlignedMemory memory(100'001, 4096);
    fill_pattern(memory.span(), 8);
    EXPECT_EQ(files.write(memory.data(), 100'001, mount->path() + "/data", true), 1u);
    std::memset(memory.data(), 0, 100'001);
    EXPECT_EQ(files.read(memory.data(), 100'001, mount->path() + "/data"), 1u);
    EXPECT_TRUE(has_pattern(memory.span(), 8));
  }
  if (!memory_mount.mounted()) GTEST_SKIP() << memory_mount.why();
  if (!overlay.mounted()) GTEST_SKIP() << overlay.why();
}

TEST(AsyncFile, TellsItsSettings) {
  AsyncFileOptions options;
  options.engine = "threads";
  options.block_bytes = 8192;
  options.queue_depth = 3;
  const AsyncFile files(options);
  EXPECT_EQ(files.backend(), "threads");
  EXPECT_EQ(files.backend_reason(), "");
  EXPECT_EQ(files.block_bytes(), 8192u);
  EXPECT_EQ(files.queue_depth(), 3u);
  options.engine = "libaio";
  EXPECT_THAT(error_of([&] { AsyncFile bad(options); }), HasSubstr("libaio"));
}

}  // namespace
}  // namespace orlop

#include "nvme/shard_file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>

#include "base/bytes.h"
#include "child.h"
#include "mounts.h"
#include "support.h"

namespace orlop::nvme {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

ShardFileOptions in(const std::string& directory, int rank = 0, const std::string& run = "run-a") {
  return {directory, rank, run, true};
}

bool exists(const std::string& path) { return std::filesystem::exists(path); }

// Case S-16, with the five tests below and that of a full disk; a name with a space.
TEST(ShardFile, MakesTheDirectoryAndRemovesItsFileAtTheEnd) {
  TempDir dir;
  const std::string nested = dir / "a b/c\xc3\xa9/d";
  {
    ShardFile file(in(nested, 3));
    EXPECT_EQ(file.path(), nested + "/orlop-r3.swap");
    file.reserve(file.alignment(), kMiB, 10);
    EXPECT_EQ(std::filesystem::file_size(file.path()), file.file_bytes());
    EXPECT_EQ(file.file_bytes(), 4096 + kMiB + 4096);
    struct stat info {};
    ASSERT_EQ(::stat(file.path().c_str(), &info), 0);
    EXPECT_GE(static_cast<uint64_t>(info.st_blocks) * 512, file.file_bytes()) << "not allocated";
    EXPECT_NO_THROW(file.check_length());
  }
  EXPECT_FALSE(exists(nested + "/orlop-r3.swap"));
}

TEST(ShardFile, TakesRelativePathsAndTheHomeDirectory) {
  TempDir dir;
  const std::string report = run_in_child([&] {
    ::setenv("HOME", dir.path().c_str(), 1);
    std::filesystem::current_path(dir.path());
    return ShardFile(in("~/swap")).path() + " " + ShardFile(in("./x/../y")).path();
  });
  EXPECT_EQ(report, dir / "swap/orlop-r0.swap " + (dir / "y/orlop-r0.swap"));
}

TEST(ShardFile, NamesThePathAndTheReasonThatADirectoryCannotBeUsed) {
  TempDir dir;
  std::ofstream(dir / "plain") << "text";
  EXPECT_THAT(error_of([&] { ShardFile file(in(dir / "plain")); }), HasSubstr(dir / "plain"));
  EXPECT_THAT(error_of([&] { ShardFile file(in(dir / "plain/under")); }),
              AllOf(HasSubstr(dir / "plain/under"), HasSubstr("Not a directory")));
  EXPECT_THAT(error_of([&] { ShardFile file(in("")); }), HasSubstr("empty path"));
}

TEST(ShardFile, RefusesAReadOnlyFileSystem) {
  const Mount mount = Mount::tmpfs(1, true);
  ORLOP_SKIP_UNLESS_MOUNTED(mount);
  EXPECT_THAT(
      error_of([&] { ShardFile file(in(mount.path())); }),
      AllOf(HasSubstr(mount.path()), HasSubstr("Read-only file system"), HasSubstr("--nvme")));
}

TEST(ShardFile, RefusesADirectoryWithoutPermission) {
  TempDir dir;
  if (::geteuid() == 0 && ::chmod(dir.path().c_str(), 0755) != 0) GTEST_SKIP();
  const std::string report = run_in_child([&]() -> std::string {
    if (::geteuid() == 0 && (::setgid(65534) != 0 || ::setuid(65534) != 0)) return "no other user";
    if (::geteuid() != 65534) ::chmod(dir.path().c_str(), 0555);
    ShardFile file(in(dir.path()));
    return "made";
  });
  if (report == "no other user") GTEST_SKIP() << report;
  EXPECT_THAT(report,
              AllOf(StartsWith("error: "), HasSubstr(dir.path()), HasSubstr("Permission denied")));
}

// Case S-15, with the test below.
TEST(ShardFile, ASecondEngineIsRefusedInTheSameProcess) {
  TempDir dir;
  ShardFile first(in(dir.path()));
  for (const auto& second :
       {in(dir.path()), in(dir.path(), 0, "run-b"), in(dir.path(), 1, "run-b")}) {
    EXPECT_THAT(error_of([&] { ShardFile file(second); }),
                AllOf(HasSubstr(dir.path()), HasSubstr(std::to_string(::getpid())),
                      HasSubstr("its own directory")));
  }
  EXPECT_TRUE(exists(first.path()));
}

TEST(ShardFile, ASecondEngineIsRefusedInAnotherProcess) {
  TempDir dir;
  ShardFile first(in(dir.path()));
  const std::string report =
      run_in_child([&] { return ShardFile(in(dir.path(), 1, "run-b")).path(); });
  EXPECT_THAT(report,
              AllOf(StartsWith("error: cannot use"), HasSubstr(std::to_string(::getpid()))));
}

TEST(ShardFile, RanksOfOneRunShareADirectory) {
  TempDir dir;
  ShardFile first(in(dir.path(), 0));
  ShardFile second(in(dir.path(), 1));
  EXPECT_EQ(run_in_child([&] { return ShardFile(in(dir.path(), 2)).path(); }),
            dir / "orlop-r2.swap");
  EXPECT_TRUE(exists(first.path()) && exists(second.path()));
}

TEST(ShardFile, TheFilesOfAKilledRunAreRemovedAndCountedBefore) {
  TempDir dir;
  const std::vector<std::string> directories = {dir.path(), dir / "absent"};
  std::vector<std::unique_ptr<ShardFile>> leaked;
  KillableChild child([&] {
    for (int rank = 0; rank < 3; ++rank) {
      leaked.push_back(std::make_unique<ShardFile>(in(dir.path(), rank, "run-dead")));
      leaked.back()->reserve(4096, kMiB, 0);
    }
  });
  ASSERT_TRUE(child.ready());
  EXPECT_THAT(error_of([&] { ShardFile file(in(dir.path())); }), HasSubstr("cannot use"));
  EXPECT_EQ(leftover_swap_bytes(directories), 0u);
  child.kill();
  EXPECT_GE(leftover_swap_bytes(directories), 3 * kMiB);
  EXPECT_EQ(inspect_shard_file(dir / "orlop-r1.swap").superblock.state, Superblock::kInUse);
  ShardFile file(in(dir.path()));
  EXPECT_TRUE(exists(dir / "orlop-r0.swap"));
  EXPECT_FALSE(exists(dir / "orlop-r1.swap"));
  EXPECT_FALSE(exists(dir / "orlop-r2.swap"));
  EXPECT_EQ(leftover_swap_bytes(directories), 0u);
}

// Case D-10: the drive is not left full until somebody starts again.
TEST(ShardFile, ARankRemovesTheFilesOfThoseOfItsRunThatWereKilled) {
  TempDir dir;
  std::vector<std::unique_ptr<ShardFile>> leaked;
  KillableChild child([&] {
    for (int rank = 1; rank < 3; ++rank) {
      leaked.push_back(std::make_unique<ShardFile>(in(dir.path(), rank)));
    }
  });
  ASSERT_TRUE(child.ready());
  { const ShardFile of_a_living_run(in(dir.path(), 0)); }
  EXPECT_TRUE(exists(dir / "orlop-r1.swap") && exists(dir / "orlop-r2.swap"));
  {
    const ShardFile survivor(in(dir.path(), 0));
    child.kill();
  }
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

TEST(ShardFile, AForkedWorkerOfADeadEngineDoesNotHoldTheDirectory) {
  TempDir dir;
  std::unique_ptr<ShardFile> leaked;
  int worker_pid[2];
  ASSERT_EQ(::pipe(worker_pid), 0);
  KillableChild engine([&] {
    leaked = std::make_unique<ShardFile>(in(dir.path(), 0, "run-dead"));
    const pid_t worker = ::fork();
    if (worker == 0) {
      while (true) ::pause();
    }
    if (::write(worker_pid[1], &worker, sizeof worker) != sizeof worker) throw std::exception();
  });
  ASSERT_TRUE(engine.ready());
  pid_t worker = 0;
  ASSERT_EQ(::read(worker_pid[0], &worker, sizeof worker), static_cast<ssize_t>(sizeof worker));
  engine.kill();
  EXPECT_NO_THROW(ShardFile file(in(dir.path())));
  ::kill(worker, SIGKILL);
  ::close(worker_pid[0]);
  ::close(worker_pid[1]);
}

TEST(ShardFile, AForkedChildLeavesTheFileAlone) {
  TempDir dir;
  auto file = std::make_unique<ShardFile>(in(dir.path()));
  EXPECT_EQ(run_in_child([&] {
              file.reset();
              return std::string("gone");
            }),
            "gone");
  EXPECT_TRUE(exists(file->path()));
}

TEST(ShardFile, DoesNotRemoveAFileThatItDidNotWrite) {
  TempDir dir;
  std::ofstream(dir / "orlop-r0.swap") << std::string(10'000, 'x');
  std::ofstream(dir / "orlop-notes.swap") << "mine";
  EXPECT_THAT(error_of([&] { ShardFile file(in(dir.path())); }),
              AllOf(HasSubstr(dir / "orlop-r0.swap"), HasSubstr("not a swap file")));
  EXPECT_EQ(std::filesystem::file_size(dir / "orlop-r0.swap"), 10'000u);
  // One that a crash left empty or all zero is no loss.
  for (const size_t bytes : {size_t{0}, size_t{100}, size_t{8192}}) {
    std::ofstream(dir / "orlop-r0.swap") << std::string(bytes, '\0');
    if (bytes != 100) {
      EXPECT_NO_THROW(ShardFile file(in(dir.path()))) << bytes;
    } else {
      EXPECT_THROW(ShardFile file(in(dir.path())), Error);
    }
  }
  EXPECT_TRUE(exists(dir / "orlop-notes.swap"));
}

TEST(ShardFile, AChangedLengthIsToldWithBothLengths) {
  TempDir dir;
  ShardFile file(in(dir.path()));
  file.reserve(4096, kMiB, 0);
  const auto bytes = static_cast<off_t>(file.file_bytes());
  for (const off_t changed : {off_t{0}, bytes / 2, bytes + 4096}) {
    ASSERT_EQ(::truncate(file.path().c_str(), changed), 0);
    EXPECT_THAT(error_of([&] { file.check_length(); }),
                AllOf(HasSubstr(file.path()), HasSubstr(std::to_string(changed) + " bytes"),
                      HasSubstr(std::to_string(bytes))));
  }
}

TEST(ShardFile, AKeptFileTellsWhatItHoldsUntilTheNextRun) {
  TempDir dir;
  const std::vector<ChunkRecord> records = {{{0, 0}, 4096, 100, 7, 0x1234},
                                            {{0, 1}, 8192, 200, -1, 0}};
  {
    ShardFile file(in(dir.path()));
    file.reserve(4096, 8192, records.size());
    file.keep(records, 2);
  }
  const std::string path = dir / "orlop-r0.swap";
  const ShardFileInfo info = inspect_shard_file(path);
  EXPECT_EQ(info.superblock.state, Superblock::kKept);
  EXPECT_EQ(info.records, records);
  EXPECT_EQ(owner_of(info.superblock), this_process());
  EXPECT_EQ(run_id_of(info.superblock), "run-a");
  {
    std::fstream damage(path, std::ios::in | std::ios::out | std::ios::binary);
    damage.seekp(static_cast<std::streamoff>(info.superblock.table_offset) + 3);
    damage.put('\x55');
  }
  EXPECT_THAT(error_of([&] { inspect_shard_file(path); }),
              HasSubstr("does not match its checksum"));
  { ShardFile file(in(dir.path(), 0, "run-b")); }
  EXPECT_FALSE(exists(path));
}

// Cases S-13 and S-16: before anything is written.
TEST(ShardFile, AFullDiskIsFoundAtTheStartWithTheBytesMissing) {
  const Mount mount = Mount::tmpfs(8);
  ORLOP_SKIP_UNLESS_MOUNTED(mount);
  struct statvfs before {};
  ASSERT_EQ(::statvfs(mount.path().c_str(), &before), 0);
  const std::string message = error_of([&] {
    ShardFile file(in(mount.path()));
    file.reserve(4096, 20 * kMiB, 0);
  });
  // 20 MiB and the superblock, of which one block is there already; 8 MiB less that block are free.
  EXPECT_THAT(message, AllOf(HasSubstr("orlop-r0.swap"), HasSubstr("needs 20971520 bytes more"),
                             HasSubstr("8384512 bytes are free"),
                             HasSubstr("12587008 bytes are missing"), HasSubstr("--nvme")));
  struct statvfs after {};
  ASSERT_EQ(::statvfs(mount.path().c_str(), &after), 0);
  EXPECT_EQ(after.f_bfree, before.f_bfree) << "a part of the file was left";
  ShardFile fits(in(mount.path()));
  fits.reserve(4096, 4 * kMiB, 0);
}

// Case S-12: what holds for one file system is not taken for another's. The line that warns of a
// swap file in memory, EveryFileSystemGivesTheSameBits reads.
TEST(ShardFile, DirectIoIsAskedOfEveryFileSystem) {
  TempDir dir;
  const Mount memory = Mount::tmpfs(8);
  const Mount drive = Mount::ext4(32, 512);
  ORLOP_SKIP_UNLESS_MOUNTED(memory);
  ORLOP_SKIP_UNLESS_MOUNTED(drive);
  const ShardFile in_memory(in(memory.path()));
  EXPECT_FALSE(in_memory.direct());
  EXPECT_THAT(in_memory.direct_io().why_not, HasSubstr("lives in memory"));
  const ShardFile on_drive(in(drive.path()));
  EXPECT_TRUE(on_drive.direct()) << on_drive.direct_io().why_not;
  ShardFileOptions buffered = in(dir.path());
  buffered.direct = false;
  EXPECT_FALSE(ShardFile(buffered).direct());
}

class SectorLength : public ::testing::TestWithParam<size_t> {};

INSTANTIATE_TEST_SUITE_P(Bytes, SectorLength, ::testing::Values(512, 4096),
                         [](const auto& info) { return std::to_string(info.param); });

TEST_P(SectorLength, IsMetByAlignment) {
  const Mount drive = Mount::ext4(32, GetParam());
  ORLOP_SKIP_UNLESS_MOUNTED(drive);
  ShardFile file(in(drive.path()));
  ASSERT_TRUE(file.direct()) << file.direct_io().why_not;
  EXPECT_EQ(file.direct_io().offset_alignment, GetParam());
  EXPECT_EQ(file.alignment() % GetParam(), 0u);
  file.reserve(file.alignment(), 4 * file.alignment(), 1);
  const AlignedMemory memory(file.alignment(), file.alignment());
  write_fully(file.fd(), memory.data(), file.alignment(), file.alignment(), file.path());
  const ChunkRecord record{{1, 2}, file.alignment(), 10, 1, 2};
  file.keep({&record, 1}, 1);
  EXPECT_EQ(inspect_shard_file(file.path()).records, std::vector{record});
}

}  // namespace
}  // namespace orlop::nvme

#include "memory/available_memory.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

namespace orlop {
namespace {

namespace fs = std::filesystem;

// A made-up /proc and /sys/fs/cgroup in a folder of its own.
class AvailableMemoryTest : public ::testing::Test {
 protected:
  AvailableMemoryTest()
      : root_(fs::temp_directory_path() / ("orlop-memory-" + std::to_string(::getpid()))) {
    write("proc/meminfo", "MemTotal:  4000 kB\nMemFree:  100 kB\nMemAvailable:   2000 kB\n");
  }
  ~AvailableMemoryTest() override { fs::remove_all(root_); }

  void write(const fs::path& name, const std::string& text) {
    fs::create_directories((root_ / name).parent_path());
    std::ofstream(root_ / name) << text;
  }
  size_t available() const { return available_host_bytes(root_ / "proc", root_ / "cgroup"); }

  fs::path root_;
};

TEST_F(AvailableMemoryTest, WithoutGroupsTheMachineDecides) {
  EXPECT_EQ(available(), 2000u * 1024);
}

TEST_F(AvailableMemoryTest, NothingReadableIsNoLimit) {
  EXPECT_EQ(available_host_bytes(root_ / "none", root_ / "none"), SIZE_MAX);
}

TEST_F(AvailableMemoryTest, Version2CountsCacheAsFree) {
  write("proc/self/cgroup", "0::/a/b\n");
  write("cgroup/a/b/memory.max", "1000000\n");
  write("cgroup/a/b/memory.current", "700000\n");
  write("cgroup/a/b/memory.stat", "anon 500000\ninactive_file 200000\n");
  EXPECT_EQ(available(), 500000u);
}

TEST_F(AvailableMemoryTest, TheTightestGroupAboveDecides) {
  write("proc/self/cgroup", "0::/a/b\n");
  write("cgroup/a/b/memory.max", "max\n");
  write("cgroup/a/b/memory.current", "1\n");
  write("cgroup/a/memory.max", "300000\n");
  write("cgroup/a/memory.current", "100000\n");
  EXPECT_EQ(available(), 200000u);
}

TEST_F(AvailableMemoryTest, AGroupOverItsLimitLeavesNothing) {
  write("proc/self/cgroup", "0::/a\n");
  write("cgroup/a/memory.max", "300000\n");
  write("cgroup/a/memory.current", "400000\n");
  EXPECT_EQ(available(), 0u);
}

TEST_F(AvailableMemoryTest, Version1) {
  write("proc/self/cgroup", "9:name=systemd:/x\n4:cpu,memory:/job/1\n0::/\n");
  write("cgroup/memory/job/1/memory.limit_in_bytes", "900000\n");
  write("cgroup/memory/job/1/memory.usage_in_bytes", "200000\n");
  write("cgroup/memory/job/1/memory.stat", "inactive_file 1\ntotal_inactive_file 50000\n");
  EXPECT_EQ(available(), 750000u);
}

TEST(AvailableMemory, OfThisMachineIsPlausible) {
  const size_t available = available_host_bytes();
  EXPECT_GT(available, size_t{1} << 20);
  EXPECT_LT(available, size_t{1} << 50);
}

}  // namespace
}  // namespace orlop

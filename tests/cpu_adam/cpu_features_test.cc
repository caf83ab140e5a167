#include "cpu_adam/cpu_features.h"

#include <sched.h>

#include <filesystem>
#include <fstream>
#include <future>
#include <iterator>
#include <numeric>
#include <thread>

#include "adam_test_support.h"
#include "orlop/error.h"

namespace orlop::test {
namespace {

std::vector<int> cpus(int begin, int end) {
  std::vector<int> list(static_cast<size_t>(end - begin));
  std::iota(list.begin(), list.end(), begin);
  return list;
}

TEST(CpuFeatures, HyperThreadsCountOnce) {
  EXPECT_EQ(physical_cores(cpus(0, 16), "core:8 pu:2"), 8);
  EXPECT_EQ(physical_cores(cpus(0, 16), "pack:2 core:4 pu:2"), 8);
  EXPECT_EQ(physical_cores(cpus(0, 12), "core:12 pu:1"), 12);
}

TEST(CpuFeatures, AffinityLimitsTheCores) {
  EXPECT_EQ(physical_cores(cpus(0, 4), "core:8 pu:2"), 2);
  EXPECT_EQ(physical_cores({0, 2, 4}, "core:8 pu:2"), 3);
  EXPECT_EQ(physical_cores({1}, "core:8 pu:2"), 1);
  EXPECT_EQ(physical_cores({3, 4}, "core:8 pu:2"), 2) << "half of two cores each";
}

TEST(CpuFeatures, TopologyThatHwlocCannotReadIsRefused) {
  EXPECT_THROW(physical_cores({0}, "no such thing"), Error);
}

TEST(CpuFeatures, RanksShareTheCoresInRunsThatLieTogether) {
  const std::string machine = "numa:2 core:4 pu:2";  // CPUs 0 to 7 in the first memory
  EXPECT_EQ(part_of_cpus(cpus(0, 16), 0, 2, machine), cpus(0, 8));
  EXPECT_EQ(part_of_cpus(cpus(0, 16), 1, 2, machine), cpus(8, 16));
  EXPECT_EQ(part_of_cpus(cpus(0, 16), 3, 4, machine), cpus(12, 16));
  // Hyper-threads numbered apart, as many servers do.
  const std::string apart = "numa:2 core:4 pu:2(indexes=0,8,1,9,2,10,3,11,4,12,5,13,6,14,7,15)";
  EXPECT_EQ(part_of_cpus(cpus(0, 16), 0, 4, apart), (std::vector<int>{0, 8, 1, 9}));
  EXPECT_EQ(part_of_cpus({0, 1, 2, 3, 4, 5}, 2, 3, "core:3 pu:2"), cpus(4, 6));
  EXPECT_EQ(part_of_cpus(cpus(0, 14), 2, 3, machine), cpus(8, 12)) << "one core stays idle";
  EXPECT_TRUE(part_of_cpus(cpus(0, 4), 0, 3, machine).empty()) << "more ranks than cores";
}

// In a thread of its own, so that the mask of the other tests stays.
TEST(CpuFeatures, FollowsTheRealAffinityMask) {
  std::async(std::launch::async, [] {
    cpu_set_t all;
    ASSERT_EQ(sched_getaffinity(0, sizeof(all), &all), 0);
    int first = 0;
    while (!CPU_ISSET(first, &all)) ++first;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(first, &one);
    const int before = usable_cores();
    ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
    EXPECT_EQ(usable_cores(), 1);
    ASSERT_EQ(sched_setaffinity(0, sizeof(all), &all), 0);
    EXPECT_EQ(usable_cores(), before);
    EXPECT_LE(before, CPU_COUNT(&all));
  }).get();
}

TEST(CpuFeatures, ThreadsAreThoseAskedForElseTheCores) {
  {
    const ScopedEnv none("OMP_NUM_THREADS", std::nullopt);
    EXPECT_EQ(default_threads(), usable_cores());
  }
  {
    const ScopedEnv asked("OMP_NUM_THREADS", "7");
    EXPECT_EQ(default_threads(), 7);
  }
  {
    const ScopedEnv nested("OMP_NUM_THREADS", "3,2");
    EXPECT_EQ(default_threads(), 3);
  }
  for (const char* wrong : {"0", "-2", "many", "4x", "4.5"}) {
    const ScopedEnv asked("OMP_NUM_THREADS", wrong);
    EXPECT_THROW(default_threads(), Error) << wrong;
  }
}

// Case P-11, with GivesTheSameBitsOnEveryIsaThreadCountAndSplit: the best that the processor has,
// and less where that is asked for.
TEST(CpuFeatures, MaxIsaCapsAndIsChecked) {
  {
    const ScopedEnv none("ORLOP_MAX_ISA", std::nullopt);
    std::ifstream file("/proc/cpuinfo");
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    const auto has = [&](const char* flag) {
      return text.find(std::string(" ") + flag + " ") != std::string::npos;
    };
    const bool avx2 = has("avx2") && has("fma") && has("f16c");
    const bool avx512 =
        avx2 && has("avx512f") && has("avx512bw") && has("avx512dq") && has("avx512vl");
    EXPECT_EQ(active_isa(), avx512 ? Isa::kAvx512 : avx2 ? Isa::kAvx2 : Isa::kScalar);
  }
  {
    const ScopedEnv scalar("ORLOP_MAX_ISA", "scalar");
    EXPECT_EQ(active_isa(), Isa::kScalar);
  }
  {
    const ScopedEnv avx2("ORLOP_MAX_ISA", "avx2");
    EXPECT_LE(active_isa(), Isa::kAvx2);
  }
  const ScopedEnv wrong("ORLOP_MAX_ISA", "avx3");
  EXPECT_THROW(active_isa(), Error);
}

TEST(CpuFeatures, SummaryNamesSetCoresAndNodes) {
  const std::string summary = cpu_summary();
  EXPECT_EQ(summary.find(isa_name(active_isa())), 0u) << summary;
  EXPECT_NE(summary.find(std::to_string(usable_cores()) + " core"), std::string::npos) << summary;
  EXPECT_NE(summary.find("NUMA node"), std::string::npos) << summary;
}

// A file tree like that of a machine, with cgroups mounted at /sys/fs/cgroup.
class CgroupQuota : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = std::filesystem::temp_directory_path() /
            ("orlop_cgroup_" + std::to_string(getpid()) + "_" +
             ::testing::UnitTest::GetInstance()->current_test_info()->name());
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  void write(const std::string& path, const std::string& text) {
    const std::filesystem::path file = root_.string() + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  void mount(const std::string& visible, const std::string& point, const std::string& tail) {
    mounts_ += "30 25 0:26 " + visible + " " + point + " rw,nosuid shared:4 - " + tail + "\n";
    write("/proc/self/mountinfo", mounts_);
  }
  std::optional<double> quota() const { return cgroup_cpu_quota(root_.string()); }

 private:
  std::filesystem::path root_;
  std::string mounts_ = "22 1 8:1 / / rw,relatime - ext4 /dev/root rw\n";
};

TEST_F(CgroupQuota, NoneWithoutCgroups) { EXPECT_EQ(quota(), std::nullopt); }

TEST_F(CgroupQuota, VersionTwo) {
  mount("/", "/sys/fs/cgroup", "cgroup2 cgroup2 rw");
  write("/proc/self/cgroup", "0::/work.slice/job\n");
  write("/sys/fs/cgroup/work.slice/job/cpu.max", "max 100000\n");
  EXPECT_EQ(quota(), std::nullopt);
  write("/sys/fs/cgroup/work.slice/job/cpu.max", "250000 100000\n");
  EXPECT_EQ(quota(), 2.5);
  write("/sys/fs/cgroup/work.slice/cpu.max", "150000 100000\n");
  EXPECT_EQ(quota(), 1.5) << "the parent binds too";
}

TEST_F(CgroupQuota, VersionTwoInANamespace) {
  mount("/../../outer", "/sys/fs/cgroup", "cgroup2 cgroup2 rw");
  write("/proc/self/cgroup", "0::/\n");
  write("/sys/fs/cgroup/cpu.max", "400000 100000\n");
  EXPECT_EQ(quota(), 4.0);
}

TEST_F(CgroupQuota, VersionOneOfAContainer) {
  mount("/docker/abc", "/sys/fs/cgroup/memory", "cgroup cgroup rw,memory");
  mount("/docker/abc", "/sys/fs/cgroup/cpu,cpuacct", "cgroup cgroup rw,cpu,cpuacct");
  write("/proc/self/cgroup", "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/\n");
  write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n");
  write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(quota(), std::nullopt);
  write("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "300000\n");
  EXPECT_EQ(quota(), 3.0);
}

TEST_F(CgroupQuota, VersionOneBelowTheMount) {
  mount("/", "/sys/fs/cgroup/cpu", "cgroup cgroup rw,cpu");
  write("/proc/self/cgroup", "4:cpu:/batch/job7\n");
  write("/sys/fs/cgroup/cpu/batch/cpu.cfs_quota_us", "800000\n");
  write("/sys/fs/cgroup/cpu/batch/cpu.cfs_period_us", "100000\n");
  write("/sys/fs/cgroup/cpu/batch/job7/cpu.cfs_quota_us", "-1\n");
  write("/sys/fs/cgroup/cpu/batch/job7/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(quota(), 8.0);
}

}  // namespace
}  // namespace orlop::test

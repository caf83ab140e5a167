#include "memory/host_arena.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/thread.h"
#include "tests/support/error_of.h"
#include "tests/support/sanitized.h"

namespace orlop {
namespace {

using test::error_of;

using test::kSanitized;
using ::testing::HasSubstr;

// The fields of /proc/self/smaps for the mapping that begins at `address`.
std::string smaps_of(const void* address) {
  std::ostringstream begin;
  begin << std::hex << reinterpret_cast<uintptr_t>(address) << '-';
  std::ifstream smaps("/proc/self/smaps");
  std::string text;
  bool inside = false;
  for (std::string line; std::getline(smaps, line);) {
    const bool header = line.find('-') != std::string::npos && line.find(' ') > 20 &&
                        line.find(':') > line.find(' ');
    if (header) inside = line.starts_with(begin.str());
    if (inside) text += line + "\n";
  }
  return text;
}

size_t smaps_kib(const std::string& smaps, const std::string& key) {
  const size_t at = smaps.find("\n" + key + ":");
  return at == std::string::npos ? 0 : std::stoul(smaps.substr(at + key.size() + 2));
}

// The CPUs that this thread may run on, by the NUMA node that they belong to.
std::map<int, std::vector<int>> cpus_by_node() {
  cpu_set_t allowed;
  std::map<int, std::vector<int>> nodes;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return nodes;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(static_cast<size_t>(cpu), &allowed)) continue;
    const std::filesystem::path folder = fmt::format("/sys/devices/system/cpu/cpu{}", cpu);
    for (int node = 0; node < 64; ++node) {
      if (std::filesystem::exists(folder / fmt::format("node{}", node))) {
        nodes[node].push_back(cpu);
      }
    }
  }
  return nodes;
}

// The NUMA nodes that hold pages of the mapping that begins at `address`: "N0" and so on.
std::vector<std::string> nodes_of(const void* address) {
  std::ifstream maps("/proc/self/numa_maps");
  const std::string begin = fmt::format("{:x} ", reinterpret_cast<uintptr_t>(address));
  std::vector<std::string> nodes;
  for (std::string line; std::getline(maps, line);) {
    if (!line.starts_with(begin)) continue;
    std::istringstream words(line);
    for (std::string word; words >> word;) {
      if (word.size() > 1 && word[0] == 'N' && std::isdigit(word[1]) != 0) {
        nodes.push_back(word.substr(0, word.find('=')));
      }
    }
  }
  return nodes;
}

// Case P-03: the slice of a rank lies in the memory of the cores that the rank has, since those
// touch it first. Of several threads, which the kernel would let run anywhere.
TEST(HostArena, LiesInTheMemoryOfTheCoresThatOpenIt) {
  if (!std::ifstream("/proc/self/numa_maps")) GTEST_SKIP() << "this kernel tells no NUMA nodes";
  const std::map<int, std::vector<int>> nodes = cpus_by_node();
  for (const auto& [node, cpus] : nodes) {
    const AffinityScope scope(cpus);
    HostArena arena(192 * kMiB);
    const std::span<std::byte> all = arena.carve(192 * kMiB, "states");
    EXPECT_THAT(nodes_of(all.data()), testing::ElementsAre(fmt::format("N{}", node)));
  }
}

// Case R-01: what is asked for is mapped, to the page; no allocator rounds it up.
TEST(HostArena, IsPageAlignedZeroAndResident) {
  // A prime number of pages, over several threads' worth of memory.
  constexpr size_t kBytes = 41'017 * kPageBytes;
  const HostArena arena(kBytes - 1);
  EXPECT_EQ(arena.capacity_bytes(), kBytes);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(arena.data()) % kPageBytes, 0u);
  const auto* begin = arena.data();
  EXPECT_EQ(std::count(begin, begin + kBytes, std::byte{0}), static_cast<ptrdiff_t>(kBytes));

  const std::string smaps = smaps_of(arena.data());
  EXPECT_EQ(smaps_kib(smaps, "Size") * 1024, kBytes) << "no rounding of the mapping";
  EXPECT_EQ(smaps_kib(smaps, "Rss") * 1024, kBytes) << "every page was touched";
}

TEST(HostArena, IsKeptOutOfForksAndDumpsAndAsksForHugePages) {
  const HostArena arena(4 * kMiB);
  const std::string smaps = smaps_of(arena.data());
  const std::string flags = smaps.substr(smaps.find("VmFlags:"));
  EXPECT_THAT(flags, HasSubstr(" dc"));
  EXPECT_THAT(flags, HasSubstr(" dd"));
  EXPECT_THAT(flags, HasSubstr(" hg"));
}

TEST(HostArena, AForkedChildDoesNotHaveIt) {
  const HostArena arena(kMiB);
  *arena.data() = std::byte{1};
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::signal(SIGSEGV, SIG_DFL);  // a sanitizer would turn the fault into an exit
    const auto value = *static_cast<volatile std::byte*>(arena.data());
    std::_Exit(static_cast<int>(value));
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV) << "status " << status;
}

TEST(HostArena, CarvesInOrderWithAlignment) {
  HostArena arena(16 * kPageBytes);
  const auto a = arena.carve(10, "grads");
  const auto b = arena.carve(300, "states");
  const auto c = arena.carve(2 * kPageBytes, "slots", kPageBytes);
  const auto d = arena.carve(1, "grads", 1);
  EXPECT_EQ(a.data(), arena.data());
  EXPECT_EQ(b.data(), arena.data() + 256);
  EXPECT_EQ(c.data(), arena.data() + kPageBytes);
  EXPECT_EQ(d.data(), arena.data() + 3 * kPageBytes);
  EXPECT_EQ(c.size(), 2 * kPageBytes);

  size_t sum = 0;
  std::vector<std::pair<std::string, size_t>> report;
  for (const auto& [purpose, bytes] : arena.report()) {
    report.emplace_back(purpose, bytes);
    sum += bytes;
  }
  const std::vector<std::pair<std::string, size_t>> expected{
      {"grads", 11}, {"alignment", 246 + kPageBytes - 556}, {"states", 300}, {"slots", 8192}};
  EXPECT_EQ(report, expected);
  EXPECT_EQ(sum, arena.used_bytes());
  EXPECT_EQ(arena.free_bytes(), 13 * kPageBytes - 1);
}

TEST(HostArena, TheBudgetIsHard) {
  HostArena arena(2 * kPageBytes);
  arena.carve(kPageBytes + 1, "states");
  const std::string text =
      error_of(ErrorCode::kDoesNotFit, [&] { arena.carve(kPageBytes, "slots"); });
  EXPECT_THAT(text, HasSubstr("slots needs"));
  EXPECT_THAT(text, HasSubstr("4096 bytes"));
  EXPECT_THAT(text, HasSubstr("4095 bytes"));
  EXPECT_THAT(text, HasSubstr("states 4.0 KiB"));
  // A refused carve takes nothing; the exact rest still fits, then nothing does.
  EXPECT_EQ(arena.carve(kPageBytes - 1, "rest", 1).size(), kPageBytes - 1);
  EXPECT_EQ(arena.free_bytes(), 0u);
  EXPECT_EQ(arena.carve(0, "empty", 1).size(), 0u);
  error_of(ErrorCode::kDoesNotFit, [&] { arena.carve(1, "one", 1); });
  error_of(ErrorCode::kDoesNotFit, [&] { arena.carve(SIZE_MAX, "wrap", 1); });
}

TEST(HostArena, MoreThanTheMachineHasIsRefusedBeforehand) {
  const std::string text =
      error_of(ErrorCode::kDoesNotFit, [] { HostArena arena(size_t{1} << 46); });
  EXPECT_THAT(text, HasSubstr("70368744177664 bytes"));
  EXPECT_THAT(text, HasSubstr("available"));
}

// Ends the process: 0 when an arena beyond the address space is refused as it should be.
[[noreturn]] void exit_after_refused_mapping() {
  rlimit limit{};
  limit.rlim_cur = limit.rlim_max = 256 * kMiB;
  ::setrlimit(RLIMIT_AS, &limit);
  try {
    HostArena arena(512 * kMiB);
  } catch (const Error& error) {
    std::fputs(error.what(), stderr);
    std::_Exit(error.code() == ErrorCode::kOutOfMemory ? 0 : 2);
  }
  std::_Exit(1);
}

TEST(HostArenaDeathTest, ARefusedMappingIsOneError) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer needs the address space";
  EXPECT_EXIT(exit_after_refused_mapping(), ::testing::ExitedWithCode(0),
              "refused to map 512.0 MiB .536870912 bytes");
}

TEST(HostArena, ANullArenaHoldsNothing) {
  HostArena arena(0);
  EXPECT_EQ(arena.capacity_bytes(), 0u);
  EXPECT_EQ(arena.carve(0, "nothing").size(), 0u);
  error_of(ErrorCode::kDoesNotFit, [&] { arena.carve(1, "one"); });
  arena.register_with([](void*, size_t) { FAIL(); });
}

TEST(HostArena, RegistersInConsecutivePieces) {
  const HostArena arena(7 * kPageBytes);
  std::vector<std::pair<std::byte*, size_t>> pieces;
  const auto record = [&](void* address, size_t bytes) {
    pieces.emplace_back(static_cast<std::byte*>(address), bytes);
  };
  arena.register_with(record);
  using Pieces = std::vector<std::pair<std::byte*, size_t>>;
  EXPECT_EQ(pieces, (Pieces{{arena.data(), 7 * kPageBytes}}));
  pieces.clear();
  arena.register_with(record, 3 * kPageBytes);
  EXPECT_EQ(pieces, (Pieces{{arena.data(), 3 * kPageBytes},
                            {arena.data() + 3 * kPageBytes, 3 * kPageBytes},
                            {arena.data() + 6 * kPageBytes, kPageBytes}}));
}

}  // namespace
}  // namespace orlop

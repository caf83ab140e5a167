// Machines that restrict io_uring, simulated in child processes: the same bytes by other means.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>

#include "base/bytes.h"
#include "child.h"
#include "nvme/direct_io.h"
#include "nvme/io_backend.h"
#include "nvme/io_queue.h"
#include "nvme/swapper.h"
#include "support.h"
#ifdef ORLOP_HAVE_URING
#include "nvme/uring_backend.h"
#endif

namespace orlop::nvme {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// What is told of these machines is no warning; the logger asks once. A level from outside wins.
[[maybe_unused]] const int kTold = ::setenv("ORLOP_LOG", "info", 0);

constexpr unsigned kSetup = 425;  // io_uring_setup, io_uring_enter, io_uring_register
constexpr unsigned kEnter = 426;
constexpr unsigned kRegister = 427;

// From now on the system calls `first` to `last` fail with `error` on all threads of this process.
void deny(unsigned first, unsigned last, int error) {
  sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, first, 0, 2),
      BPF_JUMP(BPF_JMP | BPF_JGT | BPF_K, last, 1, 0),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<unsigned>(error)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  sock_fprog program{static_cast<unsigned short>(std::size(code)), code};
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
      ::syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) != 0) {
    throw std::runtime_error("no seccomp here");
  }
}

// Swaps 8 chunks out and in through `swapper` and returns "right" or what was wrong.
std::string swap_round(Swapper& swapper, std::span<std::byte> memory) {
  SlotPool pool("swap", memory, swapper.slot_bytes());
  swapper.register_memory(memory, swapper.slot_bytes());
  for (int32_t i = 0; i < 8; ++i) {
    SlotLease slot = pool.acquire();
    fill_pattern(slot.span(), static_cast<uint64_t>(i));
    swapper.swap_out({{i, 0}, 1, i}, std::move(slot));
  }
  swapper.flush();
  for (int32_t i = 0; i < 8; ++i) {
    const SlotLease slot = swapper.swap_in({{i, 0}, 1, i}, pool.acquire()).wait();
    if (!has_pattern(slot.span(), static_cast<uint64_t>(i))) return "wrong bytes";
  }
  return "right";
}

SwapperOptions eight_chunks(const std::string& directory) {
  SwapperOptions options;
  options.directories = {directory};
  options.verify = Verify::kFull;
  for (int32_t i = 0; i < 8; ++i) options.chunks.push_back({{i, 0}, kMiB});
  return options;
}

bool has_uring() {
  try {
    make_io_backend(IoEngine::kUring, 4);
    return true;
  } catch (const Error&) {
    return false;
  }
}

struct Denial {
  unsigned first;
  unsigned last;
  int error;
  const char* call;   // named in the message
  const char* cause;  // named in the message
};

void PrintTo(const Denial& denial, std::ostream* out) {
  *out << denial.first << " to " << denial.last << " with errno " << denial.error;
}

class DeniedUring : public ::testing::TestWithParam<Denial> {};

INSTANTIATE_TEST_SUITE_P(
    Calls, DeniedUring,
    ::testing::Values(Denial{kSetup, kRegister, EPERM, "io_uring_setup", "seccomp"},
                      Denial{kSetup, kRegister, ENOSYS, "io_uring_setup", "kernel is older"},
                      Denial{kEnter, kEnter, EPERM, "io_uring_enter", "seccomp"},
                      Denial{kRegister, kRegister, EPERM, "io_uring_register", "seccomp"}));

// Case S-08; one line tells of it, whatever the number of swappers. How fast threads are,
// AreNotMuchSlowerThanTheRing measures.
TEST_P(DeniedUring, ThreadsTakeOverWithTheSameBytes) {
  if (!has_uring()) GTEST_SKIP() << "no io_uring to deny";
  TempDir dir, other;
  const Denial denial = GetParam();
  const std::string report = run_in_child([&] {
    ::testing::internal::CaptureStderr();
    deny(denial.first, denial.last, denial.error);
    Swapper swapper(eight_chunks(dir.path()));
    const Swapper second(eight_chunks(other.path()));
    AlignedMemory memory(4 * kMiB, 4096);
    return swap_round(swapper, memory.span()) + ", " + std::string(swapper.backend_name()) + ": " +
           swapper.backend_reason() + "\n" + ::testing::internal::GetCapturedStderr();
  });
  EXPECT_THAT(report, AllOf(StartsWith("right, threads: "), HasSubstr(denial.call),
                            HasSubstr(denial.cause)));
  EXPECT_THAT(report, HasSubstr("\n[orlop] [info] swapping with reads and writes on threads: "));
  EXPECT_EQ(std::count(report.begin(), report.end(), '\n'), 2) << report;
}

// Case S-09.
TEST_P(DeniedUring, ForcingTheRingTellsCallCauseAndRemedies) {
  if (!has_uring()) GTEST_SKIP() << "no io_uring to deny";
  const Denial denial = GetParam();
  const std::string report = run_in_child([&] {
    deny(denial.first, denial.last, denial.error);
    return std::string(make_io_backend(IoEngine::kUring, 4).backend->name());
  });
  EXPECT_THAT(report, AllOf(StartsWith("error: "), HasSubstr(denial.call), HasSubstr(denial.cause),
                            HasSubstr("errno " + std::to_string(denial.error)),
                            HasSubstr("profile"), HasSubstr("set nvme.engine to auto or threads")));
}

// Seconds that the engine takes to write 32 MiB and to read them: the shortest of five.
double seconds_of(IoEngine engine, const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  enable_direct_io(fd.get());
  AlignedMemory memory(32 * kMiB, 4096);
  fill_pattern(memory.span(), 1);
  IoQueue queue(make_io_backend(engine, 8).backend, {});
  double shortest = 1e9;
  for (int i = 0; i < 5; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    for (const IoOp op : {IoOp::kWrite, IoOp::kRead}) {
      start_transfer(queue, op, fd.get(), 0, memory.span()).wait();
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    shortest = std::min(shortest, took.count());
  }
  return shortest;
}

// Case S-08.
TEST(ThreadsOfIo, AreNotMuchSlowerThanTheRing) {
  if (!has_uring()) GTEST_SKIP() << "no io_uring to compare with";
  TempDir dir;
  const double ring = seconds_of(IoEngine::kUring, dir / "ring");
  const double threads = seconds_of(IoEngine::kThreads, dir / "threads");
  std::printf("32 MiB there and back: %.1f ms through the ring, %.1f ms by threads\n", 1e3 * ring,
              1e3 * threads);
  EXPECT_LT(threads, 4 * ring);
}

// Case S-08, where the sysctl forbids it.
TEST(UringRefusals, NameTheSysctlAndTheLimitOfLockedMemory) {
  EXPECT_THAT(explain_uring_error("io_uring_setup", EPERM, 2),
              AllOf(HasSubstr("kernel.io_uring_disabled is 2"), HasSubstr("errno 1")));
  EXPECT_THAT(explain_uring_error("io_uring_register", ENOMEM, -1), HasSubstr("ulimit -l"));
}

#ifdef ORLOP_HAVE_URING

TEST(UringRefusals, ARingThatIsForbiddenInTheMiddleDrainsAndFails) {
  if (!has_uring()) GTEST_SKIP() << "no io_uring to deny";
  TempDir dir;
  const std::string report = run_in_child([&]() -> std::string {
    const std::string path = dir / "data";
    const UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    AlignedMemory memory(4 * kMiB, 4096);
    fill_pattern(memory.span(), 1);
    IoQueue queue(make_io_backend(IoEngine::kUring, 8).backend, {});
    start_transfer(queue, IoOp::kWrite, fd.get(), 0, memory.span()).wait();
    deny(kEnter, kEnter, EPERM);
    std::vector<Completion<>> reads;
    for (int i = 0; i < 4; ++i) {
      reads.push_back(start_transfer(queue, IoOp::kRead, fd.get(), 0, memory.span()));
    }
    for (auto& read : reads) {
      if (!read.wait_error()) return "a read on a forbidden ring succeeded";
    }
    reads.back().wait();
    return "";
  });
  EXPECT_THAT(report, AllOf(StartsWith("error: test transfer: read of "), HasSubstr("errno 1")));
}

// Case S-07: one line tells of the limit. RLIMIT_MEMLOCK is waived for CAP_IPC_LOCK, so the child
// becomes an ordinary user.
TEST(LockedMemory, ALowLimitMeansPlainRequestsWithTheSameBytes) {
  if (!has_uring()) GTEST_SKIP() << "no io_uring here";
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become a user without CAP_IPC_LOCK";
  for (const rlim_t limit : {rlim_t{65536}, rlim_t{0}}) {
    TempDir dir;
    ASSERT_EQ(::chmod(dir.path().c_str(), 0777), 0);
    const std::string report = run_in_child([&]() -> std::string {
      const rlimit low{limit, limit};
      if (::setrlimit(RLIMIT_MEMLOCK, &low) != 0 || ::setgid(65534) != 0 || ::setuid(65534) != 0) {
        return "no other user";
      }
      ::testing::internal::CaptureStderr();
      AlignedMemory memory(8 * kMiB, 4096);
      try {
        UringBackend backend(4);
        backend.register_buffer(memory.span(), kMiB);
        if (backend.registered_buffers() != 0) return "8 MiB were locked in spite of the limit";
      } catch (const Error& error) {  // some kernels count the ring itself
        if (std::string(error.what()).find("ulimit -l") == std::string::npos) return error.what();
      }
      static_cast<void>(::testing::internal::GetCapturedStderr());
      ::testing::internal::CaptureStderr();
      Swapper swapper(eight_chunks(dir.path()));
      const std::string found = swap_round(swapper, memory.span());
      return found + "\n" + ::testing::internal::GetCapturedStderr();
    });
    EXPECT_THAT(report, AllOf(StartsWith("right\n[orlop] [info] "),
                              HasSubstr("the limit of locked memory is " + format_bytes(limit)),
                              HasSubstr("raise it (ulimit -l)")))
        << "with a limit of " << limit;
    EXPECT_EQ(std::count(report.begin(), report.end(), '\n'), 2) << report;
  }
}

TEST(LockedMemory, BuffersAreRegisteredAndGivenBack) {
  if (!has_uring()) GTEST_SKIP() << "no io_uring here";
  UringBackend backend(4);
  AlignedMemory memory(8 * kMiB, 4096);
  AlignedMemory other(kMiB, 4096);
  backend.register_buffer(memory.span(), kMiB);
  if (backend.registered_buffers() == 0) GTEST_SKIP() << "the limit of locked memory is too low";
  backend.register_buffer(other.span(), kMiB);
  EXPECT_EQ(backend.registered_buffers(), 2u);
  backend.unregister_buffer(memory.span());
  EXPECT_EQ(backend.registered_buffers(), 1u);
}

#endif

TEST(ForkedChild, EndsWithoutTouchingTheSwapperOfItsParent) {
  TempDir dir;
  auto swapper = std::make_unique<Swapper>(eight_chunks(dir.path()));
  AlignedMemory memory(4 * kMiB, 4096);
  EXPECT_EQ(run_in_child([&] {
              swapper.reset();
              return std::string("ended");
            }),
            "ended");
  EXPECT_EQ(swap_round(*swapper, memory.span()), "right");
}

// Kill in the middle of writing: the next run finds the leftover, removes it and works.
TEST(KilledEngine, LeavesNothingThatHarmsTheNextOne) {
  TempDir dir;
  int progress[2];
  ASSERT_EQ(::pipe(progress), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    SwapperOptions options = eight_chunks(dir.path());
    options.keep = true;
    Swapper swapper(options);
    AlignedMemory memory(4 * kMiB, 4096);
    SlotPool pool("swap", memory.span(), swapper.slot_bytes());
    for (int64_t version = 0;; ++version) {
      for (int32_t i = 0; i < 8; ++i) {
        SlotLease slot = pool.acquire();
        fill_pattern(slot.span(), static_cast<uint64_t>(version * 8 + i));
        swapper.swap_out({{i, 0}, version, i}, std::move(slot));
      }
      const char tick = '.';
      if (::write(progress[1], &tick, 1) != 1) ::_exit(1);
    }
  }
  char ticks[3];
  for (size_t got = 0; got < sizeof ticks;) {
    const ssize_t n = ::read(progress[0], ticks, sizeof ticks - got);
    ASSERT_GT(n, 0);
    got += static_cast<size_t>(n);
  }
  ASSERT_EQ(::kill(child, SIGKILL), 0);
  ::waitpid(child, nullptr, 0);
  ::close(progress[0]);
  ::close(progress[1]);
  ASSERT_TRUE(std::filesystem::exists(dir / "orlop-r0.swap"));
  {
    Swapper swapper(eight_chunks(dir.path()));
    AlignedMemory memory(4 * kMiB, 4096);
    EXPECT_THAT(error_of([&] {
                  SlotPool pool("swap", memory.span(), swapper.slot_bytes());
                  swapper.swap_in({{0, 0}, 0, 0}, pool.acquire()).wait();
                }),
                HasSubstr("never written"))
        << "the next run must not take old bytes for its own";
    EXPECT_EQ(swap_round(swapper, memory.span()), "right");
  }
  EXPECT_FALSE(std::filesystem::exists(dir / "orlop-r0.swap"));
}

}  // namespace
}  // namespace orlop::nvme

#include "nvme/io_queue.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <mutex>
#include <random>
#include <thread>

#include "base/bytes.h"
#include "base/unique_fd.h"
#include "faulty_backend.h"
#include "nvme/direct_io.h"
#include "support.h"

namespace orlop::nvme {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr size_t kBlock = 16 * kKiB;

// One file with direct I/O where the file system has it.
class IoQueueOnBackend : public ::testing::TestWithParam<IoEngine> {
 protected:
  IoQueueOnBackend() : path_(dir_ / "data") {
    fd_.reset(::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    enable_direct_io(fd_.get());
  }

  std::unique_ptr<IoBackend> faulty(std::unique_ptr<IoBackend> real, FaultPlan plan) {
    return std::make_unique<FaultyBackend>(std::move(real), std::move(plan));
  }
  IoQueueOptions options(unsigned depth = 8) {
    IoQueueOptions made;
    made.block_bytes = kBlock;
    made.depth = depth;
    return made;
  }
  void write_file(std::span<std::byte> data) {
    write_fully(fd_.get(), data.data(), data.size(), 0, path_);
  }

  TempDir dir_;
  std::string path_;
  UniqueFd fd_;
};

INSTANTIATE_TEST_SUITE_P(Engines, IoQueueOnBackend,
                         ::testing::Values(IoEngine::kUring, IoEngine::kThreads),
                         [](const auto& info) { return engine_name(info.param); });

// Case S-23.
TEST_P(IoQueueOnBackend, HundredRequestsAtDepthFourAllEndAlsoTheEmptyOne) {
  ORLOP_MAKE_BACKEND_OR_SKIP(real, GetParam(), 4);
  std::atomic<uint64_t> calls{0};
  auto counting = std::make_unique<FaultyBackend>(std::move(real),
                                                  [&calls](const IoRequest& request, uint64_t) {
                                                    EXPECT_GT(request.bytes, 0u);
                                                    ++calls;
                                                    return Fault::none();
                                                  });
  // The backend takes 0 to 3 requests of what it is offered.
  std::mt19937_64 random(3);
  counting->limit_submissions([&random](size_t) { return static_cast<size_t>(random() % 4); });
  IoQueue queue(std::move(counting), options(4));
  AlignedMemory memory(100 * 4096, 4096);
  fill_pattern(memory.span(), 1);
  std::vector<Completion<>> writes;
  for (size_t i = 0; i < 100; ++i) {
    const size_t bytes = i == 50 ? 0 : 4096;
    writes.push_back(start_transfer(queue, IoOp::kWrite, fd_.get(), i * 4096,
                                    memory.span().subspan(i * 4096, bytes)));
  }
  for (auto& write : writes) write.wait();
  EXPECT_EQ(calls.load(), 99u);
  AlignedMemory back(100 * 4096, 4096);
  write_fully(fd_.get(), memory.data() + 50 * 4096, 4096, 50 * 4096, path_);
  read_fully(fd_.get(), back.data(), back.span().size(), 0, path_);
  EXPECT_TRUE(has_pattern(back.span(), 1));
}

// Case S-13, of the short ones.
TEST_P(IoQueueOnBackend, ShortTransfersOfEveryLengthAreFinished) {
  const std::vector<size_t> cuts = {1,    511,  512,  513,   4095,  4096,      4097,
                                    8191, 8192, 8193, 12287, 12288, kBlock - 1};
  for (const size_t cut : cuts) {
    for (const IoOp faulty_op : {IoOp::kRead, IoOp::kWrite}) {
      ORLOP_MAKE_BACKEND_OR_SKIP(real, GetParam(), 4);
      // Every second request is cut short, so the rests are cut as well.
      IoQueue queue(faulty(std::move(real),
                           [=](const IoRequest& request, uint64_t nth) {
                             const bool now = request.op == faulty_op && nth % 2 == 0;
                             return now ? Fault::cut(std::min(cut, request.bytes)) : Fault::none();
                           }),
                    options(4));
      AlignedMemory memory(5 * kBlock, 4096);
      fill_pattern(memory.span(), cut);
      start_transfer(queue, IoOp::kWrite, fd_.get(), 0, memory.span()).wait();
      AlignedMemory back(5 * kBlock, 4096);
      start_transfer(queue, IoOp::kRead, fd_.get(), 0, back.span()).wait();
      EXPECT_TRUE(has_pattern(back.span(), cut)) << "cut after " << cut << " bytes";
      EXPECT_GT(queue.stats().retries, 0u);
    }
  }
}

// Case S-03, with the two tests of signals below: EINTR and EAGAIN where a request is taken or not,
// and where it ends.
TEST_P(IoQueueOnBackend, InterruptedAndRefusedRequestsAreTriedAgain) {
  ORLOP_MAKE_BACKEND_OR_SKIP(real, GetParam(), 8);
  std::mt19937_64 random(11);
  auto storm = std::make_unique<FaultyBackend>(std::move(real),
                                               [random](const IoRequest&, uint64_t) mutable {
                                                 switch (random() % 4) {
                                                   case 0:
                                                     return Fault::fail(EINTR);
                                                   case 1:
                                                     return Fault::fail(EAGAIN);
                                                   default:
                                                     return Fault::none();
                                                 }
                                               });
  storm->limit_submissions([random](size_t offered) mutable { return random() % (offered + 1); });
  IoQueue queue(std::move(storm), options());
  AlignedMemory memory(64 * kBlock, 4096);
  AlignedMemory back(64 * kBlock, 4096);
  fill_pattern(memory.span(), 2);
  start_transfer(queue, IoOp::kWrite, fd_.get(), 0, memory.span()).wait();
  start_transfer(queue, IoOp::kRead, fd_.get(), 0, back.span()).wait();
  EXPECT_TRUE(has_pattern(back.span(), 2));
}

TEST_P(IoQueueOnBackend, ARequestThatNeverSucceedsEndsInAnError) {
  for (const Fault fault : {Fault::fail(EAGAIN), Fault::cut(100)}) {
    ORLOP_MAKE_BACKEND_OR_SKIP(real, GetParam(), 8);
    auto limited = options();
    limited.retry_limit = milliseconds(50);
    IoQueue queue(faulty(std::move(real), [=](const IoRequest&, uint64_t) { return fault; }),
                  limited);
    AlignedMemory memory(kBlock, 4096);
    EXPECT_THAT(
        error_of([&] { start_transfer(queue, IoOp::kWrite, fd_.get(), 0, memory.span()).wait(); }),
        AllOf(HasSubstr("test transfer: write of 16384 bytes at offset 0 of the test file"),
              HasSubstr("no progress for 50 ms")));
  }
}

// Case S-04.
TEST_P(IoQueueOnBackend, AFailedBatchIsAccountedForAndTheNextOneWaitsForItself) {
  ORLOP_MAKE_BACKEND_OR_SKIP(real, GetParam(), 16);
  IoQueue queue(faulty(std::move(real),
                       [](const IoRequest&, uint64_t nth) {
                         if (nth == 3) return Fault::fail(EIO);
                         return Fault::late(milliseconds(nth < 16 ? 20 : 5));
                       }),
                options(16));
  AlignedMemory memory(16 * kBlock, 4096);
  fill_pattern(memory.span(), 4);
  write_file(memory.span());
  AlignedMemory back(16 * kBlock, 4096);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THAT(
      error_of([&] { start_transfer(queue, IoOp::kRead, fd_.get(), 0, back.span()).wait(); }),
      AllOf(HasSubstr("read of 16384 bytes at offset 49152"), HasSubstr("Input/output error"),
            HasSubstr("errno 5")));
  EXPECT_GE(std::chrono::steady_clock::now() - begin, milliseconds(20))
      << "the error came before the other 15 requests had ended";
  // Nothing writes to the buffer any more.
  fill_pattern(back.span(), 5);
  std::this_thread::sleep_for(milliseconds(30));
  EXPECT_TRUE(has_pattern(back.span(), 5));
  start_transfer(queue, IoOp::kRead, fd_.get(), 0, back.span()).wait();
  EXPECT_TRUE(has_pattern(back.span(), 4));
}

TEST_P(IoQueueOnBackend, OneFailingTransferDoesNotHarmOthers) {
  ORLOP_MAKE_BACKEND_OR_SKIP(real, GetParam(), 8);
  AlignedMemory memory(32 * kBlock, 4096);
  fill_pattern(memory.span(), 6);
  write_file(memory.span());
  IoQueue queue(faulty(std::move(real),
                       [](const IoRequest& request, uint64_t) {
                         return request.offset == 5 * kBlock ? Fault::fail(EIO) : Fault::none();
                       }),
                options());
  AlignedMemory back(32 * kBlock, 4096);
  std::vector<Completion<>> reads;
  for (size_t i = 0; i < 8; ++i) {
    reads.push_back(start_transfer(queue, IoOp::kRead, fd_.get(), i * 4 * kBlock,
                                   back.span().subspan(i * 4 * kBlock, 4 * kBlock)));
  }
  for (size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(reads[i].wait_error() != nullptr, i == 1) << "transfer " << i;
  }
}

TEST_P(IoQueueOnBackend, TransfersGoInOrderOfPriority) {
  ORLOP_MAKE_BACKEND_OR_SKIP(real, GetParam(), 1);
  std::vector<uint64_t> order;
  std::atomic<int> started{0};
  std::mutex gate;
  gate.lock();
  IoQueue queue(faulty(std::move(real),
                       [&](const IoRequest& request, uint64_t) {
                         if (started++ == 0) std::lock_guard wait(gate);  // until all are queued
                         order.push_back(request.offset / kBlock);
                         return Fault::none();
                       }),
                options(1));
  AlignedMemory memory(6 * kBlock, 4096);
  write_file(memory.span());
  std::vector<Completion<>> reads;
  const int64_t priorities[] = {9, 5, 3, 5, 1, 7};
  for (size_t i = 0; i < 6; ++i) {
    reads.push_back(start_transfer(queue, IoOp::kRead, fd_.get(), i * kBlock,
                                   memory.span().subspan(i * kBlock, kBlock), priorities[i]));
    if (i == 0) wait_for(started, 1);  // the first one starts alone
  }
  gate.unlock();
  for (auto& read : reads) read.wait();
  EXPECT_THAT(order, ::testing::ElementsAre(0u, 4u, 2u, 1u, 3u, 5u));
}

TEST_P(IoQueueOnBackend, AFileThatIsTooShortIsAnErrorWithItsLength) {
  ORLOP_MAKE_BACKEND_OR_SKIP(real, GetParam(), 8);
  IoQueue queue(std::move(real), options());
  AlignedMemory memory(4 * kBlock, 4096);
  write_file(memory.span().first(2 * kBlock));
  EXPECT_THAT(
      error_of([&] { start_transfer(queue, IoOp::kRead, fd_.get(), 0, memory.span()).wait(); }),
      AllOf(HasSubstr("met the end of the file"), HasSubstr("the file has 32768 bytes")));
}

TEST_P(IoQueueOnBackend, TheDestructorCancelsWhatWaitsAndDrainsWhatRuns) {
  std::vector<Completion<>> reads;
  std::atomic<int> started{0};
  AlignedMemory memory(64 * kBlock, 4096);
  write_file(memory.span());
  const auto begin = std::chrono::steady_clock::now();
  {
    ORLOP_MAKE_BACKEND_OR_SKIP(real, GetParam(), 2);
    IoQueue queue(faulty(std::move(real),
                         [&](const IoRequest&, uint64_t) {
                           ++started;
                           return Fault::late(milliseconds(300));
                         }),
                  options(2));
    for (size_t i = 0; i < 64; ++i) {
      reads.push_back(start_transfer(queue, IoOp::kRead, fd_.get(), i * kBlock,
                                     memory.span().subspan(i * kBlock, kBlock)));
    }
    wait_for(started, 2);
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  int succeeded = 0;
  for (auto& read : reads) {
    ASSERT_TRUE(read.done());
    if (!read.wait_error()) ++succeeded;
  }
  EXPECT_EQ(succeeded, 2);
  EXPECT_THAT(error_of([&] { reads.back().wait(); }), HasSubstr("shutting down"));
}

TEST_P(IoQueueOnBackend, TheDestructorGivesUpAfterItsLimit) {
  AlignedMemory memory(kBlock, 4096);
  write_file(memory.span());
  Completion<> read;
  auto started = std::make_shared<std::atomic<int>>(0);  // outlives the test with the backend
  auto begin = std::chrono::steady_clock::now();
  {
    ORLOP_MAKE_BACKEND_OR_SKIP(real, GetParam(), 2);
    auto limited = options();
    limited.drain_limit = milliseconds(50);
    IoQueue queue(faulty(std::move(real),
                         [started](const IoRequest&, uint64_t) {
                           ++*started;
                           return Fault::late(milliseconds(2000));
                         }),
                  limited);
    read = start_transfer(queue, IoOp::kRead, fd_.get(), 0, memory.span());
    wait_for(*started, 1);
    begin = std::chrono::steady_clock::now();
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds(1500));
  EXPECT_FALSE(read.done());
  EXPECT_EQ(read.wait_error(), nullptr);  // the memory stayed in use until here
}

// Case S-03.
TEST_P(IoQueueOnBackend, ATimerSignalEveryMillisecondChangesNothing) {
  ORLOP_MAKE_BACKEND_OR_SKIP(real, GetParam(), 8);
  IoQueue queue(std::move(real), options());
  struct sigaction before {};
  struct sigaction count {};
  count.sa_handler = [](int) {};
  ASSERT_EQ(::sigaction(SIGALRM, &count, &before), 0);
  const itimerval every_ms{{0, 1000}, {0, 1000}};
  ASSERT_EQ(::setitimer(ITIMER_REAL, &every_ms, nullptr), 0);
  AlignedMemory memory(4 * kBlock, 4096);
  AlignedMemory back(4 * kBlock, 4096);
  bool all_right = true;
  for (uint64_t i = 0; i < 1000 && all_right; ++i) {
    fill_pattern(memory.span(), i);
    start_transfer(queue, IoOp::kWrite, fd_.get(), 0, memory.span()).wait();
    start_transfer(queue, IoOp::kRead, fd_.get(), 0, back.span()).wait();
    all_right = std::memcmp(memory.data(), back.data(), back.span().size()) == 0;
  }
  const itimerval off{};
  ::setitimer(ITIMER_REAL, &off, nullptr);
  ::sigaction(SIGALRM, &before, nullptr);
  EXPECT_TRUE(all_right);
}

// Case S-03: the thread that owns the backend takes the signals itself here.
TEST_P(IoQueueOnBackend, ABackendThatIsInterruptedWhileItWaitsLosesNothing) {
  ORLOP_MAKE_BACKEND_OR_SKIP(backend, GetParam(), 8);
  struct sigaction before {};
  struct sigaction count {};
  static std::atomic<int> signals{0};
  count.sa_handler = [](int) { ++signals; };
  ASSERT_EQ(::sigaction(SIGALRM, &count, &before), 0);
  const itimerval often{{0, 200}, {0, 200}};
  ASSERT_EQ(::setitimer(ITIMER_REAL, &often, nullptr), 0);
  AlignedMemory memory(8 * kBlock, 4096);
  write_file(memory.span());
  // Every block is read again as soon as it has come back.
  std::vector<uint64_t> idle = {0, 1, 2, 3, 4, 5, 6, 7};
  std::array<IoResult, 8> results;
  for (int reaped = 0; reaped < 4000;) {
    std::erase_if(idle, [&](uint64_t block) {
      const IoRequest request{
          IoOp::kRead, fd_.get(), block * kBlock, memory.data() + block * kBlock, kBlock, block};
      return backend->submit({&request, 1}) == 1;
    });
    const size_t got = backend->reap(results, true);
    for (size_t i = 0; i < got; ++i) {
      ASSERT_EQ(results[i].result, static_cast<int64_t>(kBlock));
      idle.push_back(results[i].token);
      ++reaped;
    }
  }
  while (idle.size() < 8) {
    const size_t got = backend->reap(results, true);
    for (size_t i = 0; i < got; ++i) idle.push_back(results[i].token);
  }
  const itimerval off{};
  ::setitimer(ITIMER_REAL, &off, nullptr);
  ::sigaction(SIGALRM, &before, nullptr);
  EXPECT_GT(signals.load(), 10);
}

// A backend that moves nothing and says that it did: the cutting alone is looked at.
class NullBackend final : public IoBackend {
 public:
  std::string_view name() const override { return "null"; }
  size_t submit(std::span<const IoRequest> requests) override {
    std::lock_guard lock(mutex_);
    for (const IoRequest& request : requests) {
      results_.push_back({request.token, static_cast<int64_t>(request.bytes)});
      seen.emplace_back(request.offset, request.bytes);
    }
    return requests.size();
  }
  size_t reap(std::span<IoResult> results, bool wait) override {
    std::unique_lock lock(mutex_);
    if (wait) changed_.wait(lock, [this] { return woken_ || !results_.empty(); });
    woken_ = false;
    const size_t count = std::min(results.size(), results_.size());
    std::copy_n(results_.begin(), count, results.begin());
    results_.erase(results_.begin(), results_.begin() + static_cast<ptrdiff_t>(count));
    return count;
  }
  void wake() noexcept override {
    std::lock_guard lock(mutex_);
    woken_ = true;
    changed_.notify_all();
  }

  std::vector<std::pair<uint64_t, size_t>> seen;  // offset and length of every request, in order

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<IoResult> results_;
  bool woken_ = false;
};

// Case S-05, of writes.
TEST(IoQueue, CutsAWriteOfFiveGiBIntoBlocksWithoutGapOrOverlap) {
  auto backend = std::make_unique<NullBackend>();
  NullBackend& null = *backend;
  IoQueueOptions largest;
  largest.block_bytes = kMaxRequestBytes;
  IoQueue queue(std::move(backend), largest);
  const size_t bytes = 5 * kGiB + 4096;
  void* mapped =
      ::mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(mapped, MAP_FAILED);
  start_transfer(queue, IoOp::kWrite, 0, 8192, {static_cast<std::byte*>(mapped), bytes}).wait();
  uint64_t next = 8192;
  for (const auto& [offset, length] : null.seen) {
    EXPECT_EQ(offset, next);
    EXPECT_LE(length, kMaxRequestBytes);
    next = offset + length;
  }
  EXPECT_EQ(next, 8192 + bytes);
  EXPECT_EQ(queue.stats().bytes_written, bytes);
  ::munmap(mapped, bytes);
}

TEST(IoQueue, RefusesBlocksThatDirectIoCannotTake) {
  for (const size_t block : {size_t{0}, size_t{1000}, kMaxRequestBytes + 4096}) {
    IoQueueOptions bad;
    bad.block_bytes = block;
    EXPECT_THAT(error_of([&] { IoQueue queue(std::make_unique<NullBackend>(), bad); }),
                HasSubstr("nvme.block"));
  }
}

}  // namespace
}  // namespace orlop::nvme

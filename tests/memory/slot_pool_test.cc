#include "memory/slot_pool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <future>
#include <set>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/completion.h"
#include "memory/tensor_view.h"

namespace orlop {
namespace {

using namespace std::chrono_literals;

constexpr size_t kSlotBytes = 64;

class SlotPoolTest : public ::testing::Test {
 protected:
  std::vector<std::byte> memory_ = std::vector<std::byte>(3 * kSlotBytes + 17);
  SlotPool pool_{"test", memory_, kSlotBytes};
};

TEST_F(SlotPoolTest, LendsEverySlotOnce) {
  EXPECT_EQ(pool_.slot_count(), 3u);
  EXPECT_EQ(pool_.slot_bytes(), kSlotBytes);
  std::vector<SlotLease> leases;
  std::set<const std::byte*> addresses;
  for (size_t i = 0; i < 3; ++i) {
    leases.push_back(pool_.acquire());
    EXPECT_EQ(leases.back().span().size(), kSlotBytes);
    EXPECT_EQ(leases.back().data(), memory_.data() + leases.back().index() * kSlotBytes);
    addresses.insert(leases.back().data());
  }
  EXPECT_EQ(addresses.size(), 3u);
  EXPECT_FALSE(pool_.try_acquire().has_value());
  EXPECT_EQ(pool_.in_use(), 3u);
  leases.clear();
  EXPECT_EQ(pool_.in_use(), 0u);
  EXPECT_EQ(pool_.peak_in_use(), 3u);
  EXPECT_TRUE(pool_.try_acquire().has_value());
}

TEST_F(SlotPoolTest, ALeaseMovesAndReturnsItself) {
  SlotLease a = pool_.acquire();
  const size_t index = a.index();
  SlotLease b = std::move(a);
  EXPECT_FALSE(a);  // NOLINT(bugprone-use-after-move): an empty lease is the promise
  EXPECT_EQ(a.span().size(), 0u);
  EXPECT_TRUE(b);
  EXPECT_EQ(b.index(), index);
  EXPECT_EQ(pool_.in_use(), 1u);
  b = pool_.acquire();  // the old slot returns
  EXPECT_EQ(pool_.in_use(), 1u);
  b.release();
  b.release();
  EXPECT_FALSE(b);
  EXPECT_EQ(pool_.in_use(), 0u);
}

TEST_F(SlotPoolTest, ALeaseTravelsInACompletion) {
  Completion<SlotLease> completion;
  std::thread worker([&] { completion.set_value(pool_.acquire()); });
  const SlotLease lease = completion.wait();
  worker.join();
  EXPECT_TRUE(lease);
  EXPECT_EQ(pool_.in_use(), 1u);
}

TEST_F(SlotPoolTest, AcquireWaitsForAReturn) {
  std::vector<SlotLease> leases;
  for (int i = 0; i < 3; ++i) leases.push_back(pool_.acquire());
  auto waiting = std::async(std::launch::async, [&] { return pool_.acquire().index(); });
  EXPECT_EQ(waiting.wait_for(50ms), std::future_status::timeout);
  const size_t returned = leases[1].index();
  leases[1].release();
  EXPECT_EQ(waiting.get(), returned);
}

TEST_F(SlotPoolTest, CloseWakesWaitersWithTheFirstError) {
  std::vector<SlotLease> leases;
  for (int i = 0; i < 3; ++i) leases.push_back(pool_.acquire());
  std::vector<std::future<void>> waiters;
  for (int i = 0; i < 4; ++i) {
    waiters.push_back(std::async(std::launch::async, [&] { pool_.acquire(); }));
  }
  std::this_thread::sleep_for(20ms);
  pool_.close(std::make_exception_ptr(Error(ErrorCode::kIo, "disk gone")));
  pool_.close(std::make_exception_ptr(Error(ErrorCode::kInternal, "later")));
  const auto expect_disk_gone = [](auto&& action) {
    try {
      action();
      FAIL() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kIo);
      EXPECT_STREQ(error.what(), "disk gone");
    }
  };
  for (auto& waiter : waiters) expect_disk_gone([&] { waiter.get(); });
  std::memset(leases[0].data(), 1, kSlotBytes);  // leases that are out stay valid
  leases.clear();
  EXPECT_EQ(pool_.in_use(), 0u);
  expect_disk_gone([&] { pool_.acquire(); });
  expect_disk_gone([&] { pool_.try_acquire(); });
}

TEST(SlotPool, ALeaseMayOutliveThePool) {
  std::vector<std::byte> memory(kSlotBytes);
  SlotLease lease;
  {
    SlotPool pool("short", memory, kSlotBytes);
    lease = pool.acquire();
  }
  std::memset(lease.data(), 1, kSlotBytes);
  lease.release();
}

TEST(SlotPool, MemoryWithoutASlotIsRefused) {
  std::vector<std::byte> memory(kSlotBytes - 1);
  EXPECT_THROW(SlotPool("small", memory, kSlotBytes), Error);
  EXPECT_THROW(SlotPool("zero", memory, 0), Error);
}

// Many threads share few slots: none is lent twice at a time, none is lost, and the observer sees
// every change within the bound.
TEST_F(SlotPoolTest, IsSafeUnderThreads) {
  constexpr int kThreads = 8;
  constexpr int kRounds = 2000;
  std::atomic<size_t> seen_peak{0};
  std::atomic<int> calls{0};
  pool_.set_observer([&](size_t in_use) {
    ++calls;
    if (in_use > seen_peak) seen_peak = in_use;
  });
  std::array<std::atomic<int>, 3> owners{};
  std::atomic<int> clashes{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&] {
      for (int round = 0; round < kRounds; ++round) {
        const SlotLease lease = pool_.acquire();
        if (owners[lease.index()].fetch_add(1) != 0) ++clashes;
        lease.data()[0] = static_cast<std::byte>(round);  // a race here is TSan's to find
        owners[lease.index()].fetch_sub(1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(clashes, 0);
  EXPECT_EQ(calls, 2 * kThreads * kRounds);
  EXPECT_LE(seen_peak, 3u);
  EXPECT_EQ(seen_peak, pool_.peak_in_use());
  EXPECT_EQ(pool_.in_use(), 0u);
}

TEST(TensorView, CountsBytes) {
  float data[6] = {};
  const TensorView view{data, DType::kF32, {2, 3}};
  EXPECT_EQ(view.numel(), 6);
  EXPECT_EQ(view.span().size(), sizeof(data));
  EXPECT_EQ((TensorView{data, DType::kBF16, {}}.bytes()), 2u);
  EXPECT_EQ((TensorView{data, DType::kI64, {5, 0}}.bytes()), 0u);
}

}  // namespace
}  // namespace orlop

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/bounded_queue.h"
#include "base/completion.h"
#include "base/thread.h"
#include "base/unique_fd.h"

namespace orlop {
namespace {

using namespace std::chrono_literals;

std::exception_ptr io_error(const char* text) {
  return std::make_exception_ptr(Error(ErrorCode::kIo, text));
}

TEST(Completion, BringsAValueAcrossThreads) {
  Completion<std::unique_ptr<int>> completion;
  EXPECT_FALSE(completion.done());
  std::thread worker([completion]() mutable {
    std::this_thread::sleep_for(5ms);
    completion.set_value(std::make_unique<int>(7));
  });
  EXPECT_EQ(*completion.wait(), 7);
  EXPECT_TRUE(completion.done());
  EXPECT_EQ(completion.wait_error(), nullptr);
  worker.join();
}

TEST(Completion, BringsTheOperationsOwnError) {
  Completion<> completion;
  std::thread worker([completion]() mutable { completion.set_error(io_error("offset 7")); });
  try {
    completion.wait();
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kIo);
    EXPECT_STREQ(error.what(), "offset 7");
  }
  EXPECT_NE(completion.wait_error(), nullptr);
  EXPECT_TRUE(completion.done());
  worker.join();
}

TEST(Completion, EndsExactlyOnce) {
  Completion<int> completion;
  completion.set_value(1);
  EXPECT_THROW(completion.set_value(2), Error);
  EXPECT_THROW(completion.set_error(io_error("late")), Error);
  EXPECT_EQ(completion.wait(), 1);
}

TEST(Completion, WakesEveryWaiter) {
  Completion<int> completion;
  std::vector<std::future<std::exception_ptr>> waiters;
  for (int i = 0; i < 4; ++i) {
    waiters.push_back(
        std::async(std::launch::async, [completion] { return completion.wait_error(); }));
  }
  std::this_thread::sleep_for(5ms);
  completion.set_value(3);
  for (auto& waiter : waiters) EXPECT_EQ(waiter.get(), nullptr);
  EXPECT_EQ(Completion<int>::ready(4).wait(), 4);
}

TEST(BoundedQueue, IsFirstInFirstOut) {
  BoundedQueue<std::unique_ptr<int>> queue(3);
  for (int lap = 0; lap < 5; ++lap) {
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(queue.push(std::make_unique<int>(i)));
    for (int i = 0; i < 3; ++i) EXPECT_EQ(**queue.pop(), i);
  }
}

TEST(BoundedQueue, AFullQueueHoldsThePusher) {
  BoundedQueue<int> queue(1);
  queue.push(1);
  auto pushing = std::async(std::launch::async, [&] { return queue.push(2); });
  EXPECT_EQ(pushing.wait_for(30ms), std::future_status::timeout);
  EXPECT_EQ(queue.pop(), 1);
  EXPECT_TRUE(pushing.get());
  EXPECT_EQ(queue.pop(), 2);
}

TEST(BoundedQueue, CloseRefusesPushesAndDrainsPops) {
  BoundedQueue<int> queue(2);
  queue.push(1);
  queue.push(2);
  auto pushing = std::async(std::launch::async, [&] { return queue.push(3); });
  std::this_thread::sleep_for(5ms);
  queue.close();
  EXPECT_FALSE(pushing.get());
  EXPECT_FALSE(queue.push(4));
  EXPECT_EQ(queue.pop(), 1);
  EXPECT_EQ(queue.pop(), 2);
  EXPECT_EQ(queue.pop(), std::nullopt);

  BoundedQueue<int> empty(1);
  auto popping = std::async(std::launch::async, [&] { return empty.pop(); });
  std::this_thread::sleep_for(5ms);
  empty.close();
  EXPECT_EQ(popping.get(), std::nullopt);
}

// Several producers and consumers over a narrow queue: every item arrives once, and those of one
// producer in order at whichever consumer.
TEST(BoundedQueue, LosesNothingUnderThreads) {
  constexpr int kProducers = 4;
  constexpr int kConsumers = 3;
  constexpr int kItems = 5000;
  BoundedQueue<std::pair<int, int>> queue(2);
  std::vector<std::vector<std::atomic<int>>> counts(kProducers);
  for (auto& each : counts) each = std::vector<std::atomic<int>>(kItems);
  std::atomic<int> disorder{0};
  std::vector<std::thread> consumers;
  for (int c = 0; c < kConsumers; ++c) {
    consumers.emplace_back([&] {
      std::vector<int> last(kProducers, -1);
      while (const auto item = queue.pop()) {
        const auto producer = static_cast<size_t>(item->first);
        ++counts[producer][static_cast<size_t>(item->second)];
        if (item->second <= last[producer]) ++disorder;
        last[producer] = item->second;
      }
    });
  }
  std::vector<std::thread> producers;
  for (int p = 0; p < kProducers; ++p) {
    producers.emplace_back([&queue, p] {
      for (int i = 0; i < kItems; ++i) queue.push({p, i});
    });
  }
  for (std::thread& thread : producers) thread.join();
  queue.close();
  for (std::thread& thread : consumers) thread.join();
  EXPECT_EQ(disorder, 0);
  for (int p = 0; p < kProducers; ++p) {
    for (int i = 0; i < kItems; ++i) {
      ASSERT_EQ(counts[static_cast<size_t>(p)][static_cast<size_t>(i)], 1) << p << " " << i;
    }
  }
}

TEST(Thread, CarriesItsNameAndTakesNoSignals) {
  EXPECT_EQ(this_thread_name(), "main");
  std::string name;
  char visible[16] = {};
  sigset_t blocked;
  start_thread("optimizer-with-a-long-name", [&] {
    name = this_thread_name();
    pthread_getname_np(pthread_self(), visible, sizeof(visible));
    pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
  }).join();
  EXPECT_EQ(name, "optimizer-with-a-long-name");
  EXPECT_STREQ(visible, "optimizer-with-");
  EXPECT_TRUE(sigismember(&blocked, SIGINT) == 1 && sigismember(&blocked, SIGTERM) == 1);
  sigset_t mine;
  pthread_sigmask(SIG_BLOCK, nullptr, &mine);
  EXPECT_EQ(sigismember(&mine, SIGINT), 0);
}

bool is_open(int fd) { return ::fcntl(fd, F_GETFD) != -1; }

TEST(UniqueFd, ClosesOnce) {
  int raw = -1;
  {
    UniqueFd fd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    raw = fd.get();
    ASSERT_TRUE(is_open(raw));
    UniqueFd moved = std::move(fd);
    EXPECT_FALSE(fd);  // NOLINT(bugprone-use-after-move): an empty owner is the promise
    EXPECT_EQ(moved.get(), raw);
    UniqueFd other(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    const int second = other.get();
    other = std::move(moved);
    EXPECT_FALSE(is_open(second));
    EXPECT_TRUE(is_open(raw));
  }
  EXPECT_FALSE(is_open(raw));
}

}  // namespace
}  // namespace orlop

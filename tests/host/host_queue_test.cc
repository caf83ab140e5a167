#include "host/host_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/trace.h"
#include "host/host_backend.h"
#include "tests/support/sanitized.h"

namespace orlop {
namespace {

using host::host_queue;
using test::kSanitized;
using testing::AllOf;
using testing::HasSubstr;

std::unique_ptr<Backend> make_backend(Tracer* tracer = nullptr) {
  return make_host_backend({.device_bytes = size_t{32} << 20, .threads = 1, .tracer = tracer});
}

// Keeps a queue busy until it is opened.
class Barrier {
 public:
  ~Barrier() { open(); }
  void hold(Queue& queue) { queue.wait_gate(gate(), 1); }
  void open() {
    value_.store(1);
    value_.notify_all();
  }
  Gate gate() { return {&value_}; }

 private:
  std::atomic<uint32_t> value_{0};
};

std::string error_of(Queue& queue) {
  try {
    queue.synchronize();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(HostQueue, RunsMoreWorkThanTheRingHoldsInTheOrderOfIssue) {
  const auto backend = make_backend();
  Queue& queue = backend->queue(QueueKind::kCompute);
  constexpr int kTasks = 5 * static_cast<int>(host::HostQueue::kCapacity) + 3;
  std::vector<int> order;
  order.reserve(kTasks);
  for (int i = 0; i < kTasks; ++i) {
    host_queue(queue).enqueue("append", [&order, i] { order.push_back(i); });
  }
  queue.synchronize();
  ASSERT_EQ(order.size(), static_cast<size_t>(kTasks));
  for (int i = 0; i < kTasks; ++i) ASSERT_EQ(order[static_cast<size_t>(i)], i);
}

TEST(HostQueue, EveryKindIsAQueueOfItsOwnName) {
  const auto backend = make_backend();
  EXPECT_EQ(backend->queue(QueueKind::kCompute).name(), "compute");
  EXPECT_EQ(backend->queue(QueueKind::kUpload).name(), "upload");
  EXPECT_EQ(backend->queue(QueueKind::kOffload).name(), "offload");
  EXPECT_EQ(backend->queue(QueueKind::kComm).name(), "comm");
}

TEST(HostQueue, CopiesAndFillsMemory) {
  const auto backend = make_backend();
  Queue& queue = backend->queue(QueueKind::kUpload);
  const std::vector<int> from = {1, 2, 3, 4};
  std::vector<int> device(4), second(4, 7), back(4);
  queue.upload(device.data(), from.data(), 16);
  queue.copy_on_device(second.data(), device.data(), 16);
  queue.fill_zero(second.data(), 8);
  queue.offload(back.data(), second.data(), 16);
  queue.synchronize();
  EXPECT_EQ(back, (std::vector<int>{0, 0, 3, 4}));
}

TEST(HostEvent, AnEventThatWasNeverRecordedIsReached) {
  const auto backend = make_backend();
  const auto event = backend->make_event();
  EXPECT_TRUE(event->query());
  event->synchronize();
  backend->queue(QueueKind::kCompute).wait(*event);
  backend->synchronize();
}

TEST(HostEvent, ReachedOnlyWhenTheRecordedWorkHasRun) {
  Barrier barrier;  // outlives the queues that wait for it
  const auto backend = make_backend();
  Queue& queue = backend->queue(QueueKind::kCompute);
  const auto event = backend->make_event();
  barrier.hold(queue);
  queue.record(*event);
  EXPECT_FALSE(event->query());
  barrier.open();
  event->synchronize();
  EXPECT_TRUE(event->query());
}

// The wait captured the first point: it must not follow the event to the second one, which lies
// behind a barrier that stays shut.
TEST(HostEvent, AWaitKeepsThePointItWasIssuedFor) {
  Barrier barrier;  // outlives the queues that wait for it
  const auto backend = make_backend();
  Queue& compute = backend->queue(QueueKind::kCompute);
  Queue& upload = backend->queue(QueueKind::kUpload);
  const auto event = backend->make_event();
  std::atomic<int> value{0};
  int seen = -1;
  host_queue(upload).enqueue("set", [&value] { value = 1; });
  upload.record(*event);
  compute.wait(*event);
  host_queue(compute).enqueue("read", [&] { seen = value; });
  barrier.hold(upload);
  upload.record(*event);
  compute.synchronize();
  EXPECT_EQ(seen, 1);
  EXPECT_FALSE(event->query());
}

TEST(HostEvent, MayOutliveItsBackend) {
  auto backend = make_backend();
  const auto event = backend->make_event();
  Barrier barrier;
  barrier.hold(backend->queue(QueueKind::kCompute));
  backend->queue(QueueKind::kCompute).record(*event);
  backend.reset();
  event->synchronize();
}

TEST(HostGate, OpensForThisVersionOrALaterOne) {
  const auto backend = make_backend();
  Queue& queue = backend->queue(QueueKind::kUpload);
  std::atomic<uint32_t> version{0};
  std::atomic<int> ran{0};
  for (const uint32_t wanted : {2u, 5u}) {
    queue.wait_gate({&version}, wanted);
    host_queue(queue).enqueue("count", [&ran] { ++ran; });
  }
  const auto event = backend->make_event();
  queue.record(*event);
  version.store(1);
  version.notify_all();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(ran, 0);
  version.store(3);
  version.notify_all();
  while (ran == 0) std::this_thread::yield();
  EXPECT_FALSE(event->query());
  version.store(7);
  version.notify_all();
  queue.synchronize();
  EXPECT_EQ(ran, 2);
}

TEST(HostGate, FailedOpensEveryWait) {
  const auto backend = make_backend();
  Queue& queue = backend->queue(QueueKind::kUpload);
  std::atomic<uint32_t> version{0};
  queue.wait_gate({&version}, 1000000);
  version.store(Gate::kFailed);
  version.notify_all();
  EXPECT_NO_THROW(queue.synchronize());  // the gate's owner reports why
}

TEST(HostError, SurfacesOnceWithItsNameAndQueueThenTheQueueWorksAgain) {
  const auto backend = make_backend();
  Queue& queue = backend->queue(QueueKind::kCompute);
  bool ran = false;
  host_queue(queue).enqueue("explode", [] { fail(ErrorCode::kIo, "shard 7 is gone"); });
  host_queue(queue).enqueue("later", [&ran] { ran = true; });
  EXPECT_THAT(error_of(queue),
              AllOf(HasSubstr("explode"), HasSubstr("compute"), HasSubstr("shard 7")));
  EXPECT_FALSE(ran) << "work after a failure must be skipped";
  EXPECT_EQ(error_of(queue), "");
  host_queue(queue).enqueue("later", [&ran] { ran = true; });
  EXPECT_EQ(error_of(queue), "");
  EXPECT_TRUE(ran);
}

TEST(HostError, KeepsTheCodeOfAnErrorAndCallsOthersDeviceErrors) {
  const auto backend = make_backend();
  Queue& queue = backend->queue(QueueKind::kCompute);
  const auto code_of = [&] {
    try {
      queue.synchronize();
    } catch (const Error& error) {
      return error.code();
    }
    return ErrorCode::kInternal;
  };
  host_queue(queue).enqueue("a", [] { fail(ErrorCode::kInvalidData, "bad"); });
  EXPECT_EQ(code_of(), ErrorCode::kInvalidData);
  host_queue(queue).enqueue("b", [] { throw std::runtime_error("library"); });
  EXPECT_EQ(code_of(), ErrorCode::kDevice);
}

TEST(HostError, AWaitForFailedWorkFailsTheWaitingQueueToo) {
  const auto backend = make_backend();
  Queue& upload = backend->queue(QueueKind::kUpload);
  Queue& compute = backend->queue(QueueKind::kCompute);
  const auto event = backend->make_event();
  bool ran = false;
  host_queue(upload).enqueue("explode", [] { fail(ErrorCode::kIo, "no such shard"); });
  upload.record(*event);
  compute.wait(*event);
  host_queue(compute).enqueue("use", [&ran] { ran = true; });
  EXPECT_THROW(event->synchronize(), Error);
  EXPECT_THAT(error_of(compute), AllOf(HasSubstr("explode"), HasSubstr("upload")));
  EXPECT_FALSE(ran);
}

TEST(HostError, WorkBeforeTheFailureDoesNotFailItsWaiters) {
  const auto backend = make_backend();
  Queue& upload = backend->queue(QueueKind::kUpload);
  Queue& compute = backend->queue(QueueKind::kCompute);
  const auto event = backend->make_event();
  upload.record(*event);
  host_queue(upload).enqueue("explode", [] { fail(ErrorCode::kIo, "later"); });
  EXPECT_NE(error_of(upload), "");
  host_queue(upload).enqueue("explode", [] { fail(ErrorCode::kIo, "again"); });
  compute.wait(*event);
  EXPECT_EQ(error_of(compute), "");
  EXPECT_NE(error_of(upload), "");
}

TEST(HostError, BackendThrowsTheFirstOfAllQueuesAndClearsThemAll) {
  const auto backend = make_backend();
  host_queue(backend->queue(QueueKind::kComm)).enqueue("first", [] {
    fail(ErrorCode::kIo, "one");
  });
  const auto event = backend->make_event();
  backend->queue(QueueKind::kComm).record(*event);
  EXPECT_THROW(event->synchronize(), Error);
  host_queue(backend->queue(QueueKind::kCompute)).enqueue("second", [] {
    fail(ErrorCode::kIo, "two");
  });
  try {
    backend->synchronize();
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("first"));
  }
  EXPECT_NO_THROW(backend->synchronize());
}

// Queued work is dropped, a wait for a gate that nobody opens and a wait between queues end.
TEST(HostBackend, IsDestroyedWhileWorkIsQueued) {
  std::atomic<uint32_t> never{0};
  bool ran = false;
  {
    const auto backend = make_backend();
    Queue& upload = backend->queue(QueueKind::kUpload);
    Queue& compute = backend->queue(QueueKind::kCompute);
    const auto event = backend->make_event();
    upload.wait_gate({&never}, 3);
    upload.record(*event);
    compute.wait(*event);
    for (int i = 0; i < 100; ++i) host_queue(compute).enqueue("work", [&ran] { ran = true; });
  }
  EXPECT_FALSE(ran);
}

TEST(HostBackend, RefusesAnArenaOverTheBudgetWithBothNumbers) {
  const auto backend = make_backend();
  const DeviceInfo info = backend->info();
  EXPECT_TRUE(info.is_host);
  EXPECT_EQ(info.total_bytes, size_t{32} << 20);
  EXPECT_EQ(info.free_bytes, info.total_bytes - info.workspace_bytes);
  try {
    backend->allocate_arena(info.free_bytes + 1);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kDoesNotFit);
    EXPECT_THAT(error.what(), AllOf(HasSubstr(std::to_string(info.free_bytes + 1)),
                                    HasSubstr(std::to_string(info.free_bytes))));
  }
  void* arena = backend->allocate_arena(info.free_bytes);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(arena) % 4096, 0u);
  EXPECT_EQ(backend->info().free_bytes, 0u);
  EXPECT_THROW(backend->allocate_arena(1), Error);
}

TEST(HostBackend, RefusesABudgetBelowItsWorkspace) {
  try {
    make_host_backend({.device_bytes = 1000, .threads = 1});
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kDoesNotFit);
    EXPECT_THAT(error.what(), HasSubstr("1000"));
  }
  EXPECT_THROW(make_host_backend({.device_bytes = size_t{32} << 20, .threads = 0}), Error);
}

TEST(HostBackend, RegistersPageAlignedMemoryOnly) {
  const auto backend = make_backend();
  alignas(4096) static std::byte page[8192];
  EXPECT_NO_THROW(backend->register_host_memory(page, sizeof(page)));
  EXPECT_THROW(backend->register_host_memory(page + 8, 4096), Error);
}

TEST(HostBackend, TracesOneSpanPerClosureOnTheLaneOfItsQueue) {
  Tracer tracer;
  tracer.start();
  {
    const auto backend = make_backend(&tracer);
    host_queue(backend->queue(QueueKind::kComm)).enqueue("all_gather", [] {});
    backend->synchronize();
  }
  const std::string path = testing::TempDir() + "host_queue_trace.json";
  tracer.write(path);
  std::ifstream file(path);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  EXPECT_THAT(text, AllOf(HasSubstr("all_gather"), HasSubstr("comm")));
}

// Three queues hand a counter round by events that are recorded again and again, while another
// thread synchronizes with them, as the executor's event thread does. Any lost or early wait breaks
// the order.
TEST(HostEvent, StressOfReusedEventsKeepsTheOrder) {
  const auto backend = make_backend();
  Queue* queues[] = {&backend->queue(QueueKind::kUpload), &backend->queue(QueueKind::kCompute),
                     &backend->queue(QueueKind::kOffload)};
  std::vector<std::unique_ptr<Event>> events;
  for (int i = 0; i < 5; ++i) events.push_back(backend->make_event());
  std::atomic<bool> done{false};
  std::thread observer([&] {
    while (!done) {
      for (const auto& event : events) event->synchronize();
    }
  });
  int64_t counter = 0;  // plain: the events alone order the accesses
  int64_t wrong = 0;
  constexpr int64_t kRounds = 20000;
  for (int64_t i = 0; i < kRounds; ++i) {
    Queue& queue = *queues[i % 3];
    if (i > 0) queue.wait(*events[static_cast<size_t>((i - 1) % 5)]);
    host_queue(queue).enqueue("count", [&counter, &wrong, i] {
      if (counter != i) ++wrong;
      ++counter;
    });
    queue.record(*events[static_cast<size_t>(i % 5)]);
  }
  backend->synchronize();
  done = true;
  observer.join();
  EXPECT_EQ(counter, kRounds);
  EXPECT_EQ(wrong, 0);
}

// A wake-up that is lost leaves both threads asleep until the time limit of the test.
TEST(Gate, TwoThreadsThatWakeEachOtherByTurnsNeverMissATurn) {
  // What goes wrong here is an order of the processor; a sanitizer sees the code in fewer turns.
  constexpr uint32_t kRounds = kSanitized ? 10'000 : 1'000'000;
  struct alignas(64) Counter {
    std::atomic<uint32_t> value{0};
  };
  Counter there;
  Counter back;
  std::thread other([&] {
    for (uint32_t round = 1; round <= kRounds; ++round) {
      await_gate({&there.value}, round);
      open_gate({&back.value}, round);
    }
  });
  for (uint32_t round = 1; round <= kRounds; ++round) {
    open_gate({&there.value}, round);
    await_gate({&back.value}, round);
  }
  other.join();
  EXPECT_EQ(back.value.load(), kRounds);
}

}  // namespace
}  // namespace orlop

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <vector>

#include "backend/backend.h"
#include "base/bytes.h"
#include "comm/single_communicator.h"
#include "comm/thread_communicator.h"
#include "host/host_backend.h"
#include "host/host_queue.h"
#include "orlop/error.h"
#include "tests/comm/communicator_suite.h"

namespace orlop {
namespace {

std::unique_ptr<Backend> small_backend() {
  return make_host_backend({.device_bytes = 64 * kMiB, .threads = 1, .reference_ops = true});
}

void issue(Queue& queue, const CollectiveCall& call) {
  static_cast<host::HostQueue&>(queue).enqueue(collective_name(call.id.kind), call);
}

// Every rank with a backend of its own, as in separate processes.
void run_with_queues(int world_size, const std::function<void(Communicator&, Queue&)>& body) {
  run_ranks(world_size, issue, [&](Communicator& communicator) {
    const std::unique_ptr<Backend> backend = small_backend();
    body(communicator, backend->queue(QueueKind::kComm));
    backend->synchronize();
  });
}

class ThreadCommunicatorTest : public testing::TestWithParam<int> {
 protected:
  const int world_size_ = GetParam();
};

TEST_P(ThreadCommunicatorTest, AllGatherConcatenatesInRankOrder) {
  run_with_queues(world_size_, test::expect_all_gather);
}

TEST_P(ThreadCommunicatorTest, ReduceScatterSumsInRankOrder) {
  run_with_queues(world_size_, test::expect_reduce_scatter);
}

TEST_P(ThreadCommunicatorTest, SixteenBitSumsRoundOnce) {
  run_with_queues(world_size_, test::expect_sixteen_bit_sums_round_once);
}

TEST_P(ThreadCommunicatorTest, AllToAllTurnsRowsIntoColumns) {
  run_with_queues(world_size_, test::expect_all_to_all);
}

TEST_P(ThreadCommunicatorTest, BroadcastComesFromEveryRoot) {
  run_with_queues(world_size_, test::expect_broadcast);
}

TEST_P(ThreadCommunicatorTest, HostSumsRunInRankOrderBesideTheQueue) {
  run_with_queues(world_size_, test::expect_host_values_beside_the_queue);
}

TEST_P(ThreadCommunicatorTest, BarrierHoldsEveryRank) {
  std::atomic<int> arrived{0};
  run_ranks(world_size_, issue, [&](Communicator& comm) {
    for (int round = 1; round <= 20; ++round) {
      arrived.fetch_add(1);
      comm.barrier("test");
      EXPECT_GE(arrived.load(), round * world_size_);
      comm.barrier("test");
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, ThreadCommunicatorTest, testing::Values(1, 2, 3, 5));

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCommunicator) << error.what();
    return error.what();
  }
  return "no error";
}

TEST(ThreadCommunicatorErrorTest, RanksThatDisagreeAreToldHow) {
  std::atomic<int> failures{0};
  run_with_queues(3, [&](Communicator& comm, Queue& queue) {
    std::vector<float> send(60), recv(60);
    const int64_t count = comm.rank() == 2 ? 9 : 10;
    comm.all_gather(queue, send.data(), recv.data(), 7, DType::kF32, "layer.4");
    comm.all_gather(queue, send.data(), recv.data(), count, DType::kF32, "test");
    const std::string message = error_of([&] { queue.synchronize(); });
    EXPECT_THAT(message, testing::HasSubstr("rank 0 calls all_gather of 10 F32"));
    EXPECT_THAT(message, testing::HasSubstr("rank 2 calls all_gather of 9 F32"));
    EXPECT_THAT(message,
                testing::HasSubstr(fmt::format(
                    "rank {} had last completed all_gather of 7 F32 (layer.4)", comm.rank())));
    failures.fetch_add(1);
  });
  EXPECT_EQ(failures.load(), 3);
}

// Case D-06: the first difference, and what each rank had completed before it.
TEST(ThreadCommunicatorErrorTest, ASkippedCollectiveIsNamedWithThoseBeforeIt) {
  std::atomic<int> failures{0};
  run_with_queues(3, [&](Communicator& comm, Queue& queue) {
    std::vector<float> send(60), recv(60);
    for (int layer = 0; layer < 9; ++layer) {
      if (comm.rank() == 1 && layer == 7) continue;
      comm.all_gather(queue, send.data(), recv.data(), 10 + layer, DType::kF32,
                      fmt::format("layer.{}", layer));
    }
    const std::string message = error_of([&] { queue.synchronize(); });
    EXPECT_THAT(message, testing::HasSubstr("rank 0 calls all_gather of 17 F32 (layer.7), "
                                            "rank 1 calls all_gather of 18 F32 (layer.8)"));
    EXPECT_THAT(
        message,
        testing::EndsWith(fmt::format(
            "rank {} had last completed all_gather of 16 F32 (layer.6), number 7 of its queue, "
            "after all_gather of 15 F32 (layer.5), all_gather of 14 F32 (layer.4), "
            "all_gather of 13 F32 (layer.3), all_gather of 12 F32 (layer.2)",
            comm.rank())));
    failures.fetch_add(1);
  });
  EXPECT_EQ(failures.load(), 3);
}

TEST(ThreadCommunicatorErrorTest, AFailedRankReleasesTheOthers) {
  std::atomic<int> released{0};
  const auto body = [&](Communicator& comm) {
    if (comm.rank() == 1) throw std::runtime_error("out of paper");
    const std::string message = error_of([&] { comm.barrier("test"); });
    EXPECT_THAT(message, testing::HasSubstr("rank 1"));
    released.fetch_add(1);
  };
  EXPECT_THROW(
      {
        try {
          run_ranks(3, issue, body);
        } catch (const std::runtime_error& error) {
          EXPECT_STREQ(error.what(), "out of paper");
          throw;
        }
      },
      std::runtime_error);
  EXPECT_EQ(released.load(), 2);
}

TEST(ThreadCommunicatorErrorTest, RefusesWhatCannotBeSummed) {
  run_with_queues(2, [](Communicator& comm, Queue& queue) {
    std::vector<int32_t> send(2), recv(1);
    EXPECT_THAT(error_of([&] {
                  comm.reduce_scatter(queue, send.data(), recv.data(), 1, DType::kI32, "test");
                }),
                testing::HasSubstr("I32"));
    EXPECT_THAT(error_of([&] { comm.broadcast(queue, send.data(), 1, DType::kI32, 2, "test"); }),
                testing::HasSubstr("rank 2"));
  });
}

TEST(SingleCommunicatorTest, CopiesOnTheQueueOrDoesNothing) {
  const std::unique_ptr<Backend> backend = small_backend();
  Queue& queue = backend->queue(QueueKind::kComm);
  SingleCommunicator comm([](Queue& on, void* to, const void* from, size_t bytes) {
    on.copy_on_device(to, from, bytes);
  });
  EXPECT_EQ(comm.rank(), 0);
  EXPECT_EQ(comm.world_size(), 1);
  const std::vector<float> send = test::values_of_rank(0, 100);
  std::vector<float> gathered(100), scattered(100), same = send;
  comm.all_gather(queue, send.data(), gathered.data(), 100, DType::kF32, "test");
  comm.reduce_scatter(queue, send.data(), scattered.data(), 100, DType::kF32, "test");
  comm.all_gather(queue, same.data(), same.data(), 100, DType::kF32, "test");
  comm.broadcast(queue, same.data(), 100, DType::kF32, 0, "test");
  queue.synchronize();
  EXPECT_EQ(gathered, send);
  EXPECT_EQ(scattered, send);
  EXPECT_EQ(same, send);
  std::vector<double> sums = {1.5};
  comm.all_reduce_sum(sums, "test");
  EXPECT_EQ(sums.front(), 1.5);
  EXPECT_THROW(comm.broadcast(queue, same.data(), 100, DType::kF32, 1, "test"), Error);
}

}  // namespace
}  // namespace orlop

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "backend/backend.h"
#include "base/bytes.h"
#include "base/half.h"
#include "comm/single_communicator.h"
#include "comm/thread_communicator.h"
#include "host/host_backend.h"
#include "host/host_queue.h"
#include "orlop/error.h"

namespace orlop {
namespace {

std::unique_ptr<Backend> small_backend() {
  return make_host_backend({.device_bytes = 64 * kMiB, .threads = 1, .reference_ops = true});
}

void issue(Queue& queue, const CollectiveCall& call) {
  static_cast<host::HostQueue&>(queue).enqueue(collective_name(call.kind), call);
}

// Every rank with a backend of its own, as in separate processes.
void run_with_queues(int world_size, const std::function<void(Communicator&, Queue&)>& body) {
  run_ranks(world_size, issue, [&](Communicator& communicator) {
    const std::unique_ptr<Backend> backend = small_backend();
    body(communicator, backend->queue(QueueKind::kComm));
    backend->synchronize();
  });
}

// Large and small values of both signs: their fp32 sum depends on the order.
std::vector<float> values_of(int rank, size_t numel) {
  std::mt19937 random(100 + static_cast<unsigned>(rank));
  std::uniform_real_distribution<float> mantissa(-1.0f, 1.0f);
  std::uniform_int_distribution<int> exponent(-6, 6);
  std::vector<float> values(numel);
  for (float& value : values) value = std::ldexp(mantissa(random), exponent(random));
  return values;
}

class ThreadCommunicatorTest : public testing::TestWithParam<int> {
 protected:
  const int world_size_ = GetParam();
  size_t ranks() const { return static_cast<size_t>(world_size_); }
};

constexpr size_t kCounts[] = {0, 1, 7, 1000};

TEST_P(ThreadCommunicatorTest, AllGatherConcatenatesInRankOrder) {
  run_with_queues(world_size_, [&](Communicator& comm, Queue& queue) {
    for (const size_t count : kCounts) {
      const std::vector<float> send = values_of(comm.rank(), count);
      std::vector<float> recv(count * ranks(), -7.0f), want;
      for (int r = 0; r < world_size_; ++r) {
        const std::vector<float> row = values_of(r, count);
        want.insert(want.end(), row.begin(), row.end());
      }
      comm.all_gather(queue, send.data(), recv.data(), static_cast<int64_t>(count), DType::kF32);
      queue.synchronize();
      EXPECT_EQ(recv, want) << "rank " << comm.rank() << ", count " << count;

      std::vector<float> in_place(count * ranks(), -7.0f);
      float* row = in_place.data() + static_cast<size_t>(comm.rank()) * count;
      std::copy(send.begin(), send.end(), row);
      comm.all_gather(queue, row, in_place.data(), static_cast<int64_t>(count), DType::kF32);
      queue.synchronize();
      EXPECT_EQ(in_place, want) << "in place, rank " << comm.rank() << ", count " << count;
    }
  });
}

TEST_P(ThreadCommunicatorTest, ReduceScatterSumsInRankOrder) {
  run_with_queues(world_size_, [&](Communicator& comm, Queue& queue) {
    for (const size_t count : kCounts) {
      const size_t begin = static_cast<size_t>(comm.rank()) * count;
      std::vector<float> want(count);
      for (int r = 0; r < world_size_; ++r) {
        const std::vector<float> other = values_of(r, count * ranks());
        for (size_t i = 0; i < count; ++i) {
          want[i] = r == 0 ? other[begin + i] : want[i] + other[begin + i];
        }
      }
      std::vector<float> send = values_of(comm.rank(), count * ranks()), recv(count);
      comm.reduce_scatter(queue, send.data(), recv.data(), static_cast<int64_t>(count),
                          DType::kF32);
      comm.reduce_scatter(queue, send.data(), send.data() + begin, static_cast<int64_t>(count),
                          DType::kF32);
      queue.synchronize();
      EXPECT_EQ(recv, want) << "rank " << comm.rank() << ", count " << count;
      const std::vector<float> row(send.begin() + static_cast<ptrdiff_t>(begin),
                                   send.begin() + static_cast<ptrdiff_t>(begin + count));
      EXPECT_EQ(row, want) << "in place, rank " << comm.rank() << ", count " << count;
    }
  });
}

TEST_P(ThreadCommunicatorTest, SixteenBitSumsRoundOnce) {
  constexpr size_t kCount = 200;
  struct Format {
    DType dtype;
    float (*load)(uint16_t);
    uint16_t (*store)(float);
  };
  for (const Format& format : {Format{DType::kBF16, bf16_to_float, float_to_bf16},
                               Format{DType::kF16, fp16_to_float, float_to_fp16}}) {
    run_with_queues(world_size_, [&](Communicator& comm, Queue& queue) {
      const auto packed = [&](int rank) {
        std::vector<uint16_t> values;
        for (const float value : values_of(rank, kCount * ranks())) {
          values.push_back(format.store(value));
        }
        return values;
      };
      const std::vector<uint16_t> send = packed(comm.rank());
      std::vector<uint16_t> recv(kCount);
      comm.reduce_scatter(queue, send.data(), recv.data(), kCount, format.dtype);
      queue.synchronize();
      std::vector<float> sums(kCount, 0.0f);
      for (int r = 0; r < world_size_; ++r) {
        const std::vector<uint16_t> other = packed(r);
        for (size_t i = 0; i < kCount; ++i) {
          sums[i] += format.load(other[static_cast<size_t>(comm.rank()) * kCount + i]);
        }
      }
      for (size_t i = 0; i < kCount; ++i) ASSERT_EQ(recv[i], format.store(sums[i])) << i;
    });
  }
}

TEST_P(ThreadCommunicatorTest, BroadcastComesFromEveryRoot) {
  run_with_queues(world_size_, [&](Communicator& comm, Queue& queue) {
    for (int root = 0; root < world_size_; ++root) {
      std::vector<float> buffer = values_of(comm.rank(), 33);
      comm.broadcast(queue, buffer.data(), 33, DType::kF32, root);
      queue.synchronize();
      EXPECT_EQ(buffer, values_of(root, 33));
    }
  });
}

TEST_P(ThreadCommunicatorTest, HostSumsRunInRankOrderBesideTheQueue) {
  run_with_queues(world_size_, [&](Communicator& comm, Queue& queue) {
    std::vector<float> send = values_of(comm.rank(), 50), recv(50 * ranks());
    for (int round = 0; round < 50; ++round) {
      comm.all_gather(queue, send.data(), recv.data(), 50, DType::kF32);
      std::vector<double> sums(3), want(3);
      const auto value = [&](int rank, size_t i) {
        return std::pow(10.0, rank * 5 - 8) * (static_cast<double>(i) + 1.0 / 3 + round);
      };
      for (size_t i = 0; i < 3; ++i) {
        sums[i] = value(comm.rank(), i);
        for (int r = 0; r < world_size_; ++r) want[i] += value(r, i);
      }
      comm.all_reduce_sum(sums);
      ASSERT_EQ(sums, want);
    }
    queue.synchronize();
  });
}

TEST_P(ThreadCommunicatorTest, BarrierHoldsEveryRank) {
  std::atomic<int> arrived{0};
  run_ranks(world_size_, issue, [&](Communicator& comm) {
    for (int round = 1; round <= 20; ++round) {
      arrived.fetch_add(1);
      comm.barrier();
      EXPECT_GE(arrived.load(), round * world_size_);
      comm.barrier();
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
    comm.all_gather(queue, send.data(), recv.data(), count, DType::kF32);
    const std::string message = error_of([&] { queue.synchronize(); });
    EXPECT_THAT(message, testing::HasSubstr("rank 0 calls all_gather of 10 F32"));
    EXPECT_THAT(message, testing::HasSubstr("rank 2 calls all_gather of 9 F32"));
    failures.fetch_add(1);
  });
  EXPECT_EQ(failures.load(), 3);
}

TEST(ThreadCommunicatorErrorTest, AFailedRankReleasesTheOthers) {
  std::atomic<int> released{0};
  const auto body = [&](Communicator& comm) {
    if (comm.rank() == 1) throw std::runtime_error("out of paper");
    const std::string message = error_of([&] { comm.barrier(); });
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
    EXPECT_THAT(
        error_of([&] { comm.reduce_scatter(queue, send.data(), recv.data(), 1, DType::kI32); }),
        testing::HasSubstr("I32"));
    EXPECT_THAT(error_of([&] { comm.broadcast(queue, send.data(), 1, DType::kI32, 2); }),
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
  const std::vector<float> send = values_of(0, 100);
  std::vector<float> gathered(100), scattered(100), same = send;
  comm.all_gather(queue, send.data(), gathered.data(), 100, DType::kF32);
  comm.reduce_scatter(queue, send.data(), scattered.data(), 100, DType::kF32);
  comm.all_gather(queue, same.data(), same.data(), 100, DType::kF32);
  comm.broadcast(queue, same.data(), 100, DType::kF32, 0);
  queue.synchronize();
  EXPECT_EQ(gathered, send);
  EXPECT_EQ(scattered, send);
  EXPECT_EQ(same, send);
  std::vector<double> sums = {1.5};
  comm.all_reduce_sum(sums);
  EXPECT_EQ(sums.front(), 1.5);
  EXPECT_THROW(comm.broadcast(queue, same.data(), 100, DType::kF32, 1), Error);
}

}  // namespace
}  // namespace orlop

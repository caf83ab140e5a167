// One rank of a run of processes, by MPI or by sockets as the environment says.
//   comm_worker suite           the suite of all communicators
//   comm_worker disagree        one rank calls another count: every rank is told of both
//   comm_worker skipped         rank 1 leaves one collective out: every rank is told of both
//   comm_worker slow            rank 1 never comes to a collective: the others are told after 2 s
//   comm_worker abort           rank 1 fails before its first collective: the others are told why
//   comm_worker world           the launcher announces one rank more than MPI makes
//   comm_worker killed          rank 1 is killed: the others are told, by sockets at once
//   comm_worker leaving         rank 1 leaves in good order: the others are told when they wait
//   comm_worker speed           prints the median seconds of collectives of 64 MiB
// A rank that gets an error prints "told: <message>".

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <iostream>
#include <thread>

#include "comm/rendezvous.h"
#include "host/host_backend.h"
#include "host/host_queue.h"
#include "orlop/error.h"
#include "tests/comm/communicator_suite.h"

namespace orlop::test {
namespace {

std::string mode;

void issue(Queue& queue, const CollectiveCall& call) {
  host::host_queue(queue).enqueue(collective_name(call.id.kind), call);
}

bool by_sockets() { return process_environment("ORLOP_RENDEZVOUS").has_value(); }

std::unique_ptr<HostCommunicator> join(const RankIds& ids) {
  return join_ranks_of(
      ids, process_environment,
      {.issue = issue, .timeout_seconds = mode == "slow" ? 2.0 : 60.0, .silence_seconds = 8}, 20);
}

class Rank {
 public:
  Rank()
      : backend_(make_host_backend({.device_bytes = 64 << 20, .threads = 1})),
        communicator_(join(read_rank_ids(process_environment))) {}

  Communicator& comm() { return *communicator_; }
  Queue& queue() { return backend_->queue(QueueKind::kComm); }
  int rank() const { return communicator_->rank(); }
  void leave() { communicator_.reset(); }

 private:
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<HostCommunicator> communicator_;
};

TEST(RankTest, Suite) {
  Rank self;
  ASSERT_GE(self.comm().world_size(), 2);
  expect_all_gather(self.comm(), self.queue());
  expect_reduce_scatter(self.comm(), self.queue());
  expect_sixteen_bit_sums_round_once(self.comm(), self.queue());
  expect_all_to_all(self.comm(), self.queue());
  expect_broadcast(self.comm(), self.queue());
  expect_host_values_beside_the_queue(self.comm(), self.queue());
  if (!by_sockets()) {
    EXPECT_THROW(join(read_rank_ids(process_environment)), Error) << "MPI starts once only";
  }
}

std::string told(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCommunicator);
    std::cout << "told: " << error.what() << std::endl;
    return error.what();
  }
  return "nothing";
}

TEST(RankTest, Disagree) {
  Rank self;
  std::vector<float> send(60), recv(240);
  const int64_t count = self.rank() == 1 ? 9 : 10;
  const std::string message = told([&] {
    self.comm().all_gather(self.queue(), send.data(), recv.data(), count, DType::kF32, "layer.3");
    self.queue().synchronize();
  });
  EXPECT_THAT(message, testing::HasSubstr("rank 0 calls all_gather of 10 F32 (layer.3)"));
  EXPECT_THAT(message, testing::HasSubstr("rank 1 calls all_gather of 9 F32 (layer.3)"));
}

TEST(RankTest, Skipped) {
  Rank self;
  std::vector<float> send(60), recv(240);
  told([&] {
    for (int layer = 0; layer < 9; ++layer) {
      if (self.rank() == 1 && layer == 7) continue;
      self.comm().all_gather(self.queue(), send.data(), recv.data(), 10, DType::kF32,
                             "layer." + std::to_string(layer));
    }
    self.queue().synchronize();
  });
}

TEST(RankTest, Slow) {
  Rank self;
  self.comm().barrier("start");
  if (self.rank() == 1) {
    std::this_thread::sleep_for(std::chrono::seconds(4));
  } else {
    EXPECT_THAT(told([&] { self.comm().barrier("step"); }),
                testing::AllOf(testing::HasSubstr("all_gather of 0 U8 (step)"),
                               testing::HasSubstr("for rank 1")));
  }
}

TEST(RankTest, Abort) {
  Rank self;
  if (self.rank() == 1) {
    self.comm().abort("out of paper");
  } else {
    std::vector<float> send(4), recv(16);
    EXPECT_THAT(told([&] {
                  self.comm().all_gather(self.queue(), send.data(), recv.data(), 4, DType::kF32,
                                         "layer.3");
                  self.queue().synchronize();
                }),
                testing::HasSubstr("rank 1 has failed: out of paper"));
  }
  EXPECT_THAT(told([&] { self.comm().barrier("after"); }), testing::HasSubstr("out of paper"));
}

TEST(RankTest, World) {
  RankIds ids = read_rank_ids(process_environment);
  const int made = ids.world_size++;
  EXPECT_THAT(told([&] { join(ids); }),
              testing::HasSubstr(std::to_string(ids.rank) + " of " + std::to_string(made)));
}

TEST(RankTest, Killed) {
  Rank self;
  self.comm().barrier("start");
  if (self.rank() == 1) ::raise(SIGKILL);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THAT(told([&] { self.comm().barrier("step"); }),
              testing::HasSubstr(by_sockets() ? "rank 1 has ended without a word"
                                              : "rank 1 has given no sign of life"));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(by_sockets() ? 3 : 15));
}

TEST(RankTest, Leaving) {
  Rank self;
  self.comm().barrier("start");
  if (self.rank() == 1) {
    self.leave();
  } else {
    EXPECT_THAT(told([&] { self.comm().barrier("step"); }),
                testing::HasSubstr("rank 1 has left the run"));
  }
}

TEST(RankTest, Speed) {
  Rank self;
  constexpr size_t kBytes = size_t{64} << 20;
  const size_t ranks = static_cast<size_t>(self.comm().world_size());
  const int64_t count = static_cast<int64_t>(kBytes / sizeof(float) / ranks);
  std::vector<float> part(static_cast<size_t>(count), 1.0f), whole(part.size() * ranks, 1.0f);
  const auto measure = [&](const char* name, const std::function<void()>& collective) {
    std::vector<double> seconds;
    for (int i = 0; i < 9; ++i) {
      self.comm().barrier("start");
      const auto begin = std::chrono::steady_clock::now();
      collective();
      self.queue().synchronize();
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
      seconds.push_back(took.count());
    }
    std::sort(seconds.begin(), seconds.end());
    if (self.rank() == 0) {
      std::cout << "speed " << name << ' ' << seconds[seconds.size() / 2] << " (" << seconds.front()
                << " to " << seconds.back() << ')' << std::endl;
    }
  };
  measure("all_gather", [&] {
    self.comm().all_gather(self.queue(), part.data(), whole.data(), count, DType::kF32, "speed");
  });
  measure("reduce_scatter", [&] {
    self.comm().reduce_scatter(self.queue(), whole.data(), part.data(), count, DType::kF32,
                               "speed");
  });
  measure("barrier", [&] { self.comm().barrier("speed"); });
}

}  // namespace
}  // namespace orlop::test

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (argc != 2) return 2;
  orlop::test::mode = argv[1];
  std::string test = orlop::test::mode;
  test.front() = static_cast<char>(std::toupper(test.front()));
  GTEST_FLAG_SET(filter, "*." + test);
  return RUN_ALL_TESTS();
}

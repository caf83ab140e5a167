// One rank of a run that mpirun starts.
//   mpi_worker suite           the suite of all communicators
//   mpi_worker disagree        one rank calls another count: every rank is told of both
//   mpi_worker slow            rank 1 never comes to a collective: the others are told after 2 s
//   mpi_worker abort           rank 1 fails before its first collective: the others are told why
//   mpi_worker world           the launcher announces one rank more than MPI makes
//   mpi_worker killed          rank 1 is killed: the others are told within 15 s
// A rank that gets an error prints "told: <message>".

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <cstring>
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

// MPI lives once per process.
class MpiRank {
 public:
  MpiRank()
      : backend_(make_host_backend({.device_bytes = 64 << 20, .threads = 1})),
        communicator_(join_through_mpi(read_rank_ids(process_environment),
                                       {.issue = issue,
                                        .timeout_seconds = mode == "slow" ? 2.0 : 60.0,
                                        .silence_seconds = 8})) {}

  Communicator& comm() { return *communicator_; }
  Queue& queue() { return backend_->queue(QueueKind::kComm); }
  int rank() const { return communicator_->rank(); }

 private:
  std::unique_ptr<Backend> backend_;
  std::unique_ptr<HostCommunicator> communicator_;
};

TEST(MpiCommunicatorTest, Suite) {
  MpiRank self;
  ASSERT_GE(self.comm().world_size(), 2);
  expect_all_gather(self.comm(), self.queue());
  expect_reduce_scatter(self.comm(), self.queue());
  expect_sixteen_bit_sums_round_once(self.comm(), self.queue());
  expect_broadcast(self.comm(), self.queue());
  expect_host_values_beside_the_queue(self.comm(), self.queue());
  EXPECT_THROW(join_through_mpi(read_rank_ids(process_environment), {}), Error) << "once only";
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

TEST(MpiCommunicatorTest, Disagree) {
  MpiRank self;
  std::vector<float> send(60), recv(240);
  const int64_t count = self.rank() == 1 ? 9 : 10;
  const std::string message = told([&] {
    self.comm().all_gather(self.queue(), send.data(), recv.data(), count, DType::kF32, "layer.3");
    self.queue().synchronize();
  });
  EXPECT_THAT(message, testing::HasSubstr("rank 0 calls all_gather of 10 F32 (layer.3)"));
  EXPECT_THAT(message, testing::HasSubstr("rank 1 calls all_gather of 9 F32 (layer.3)"));
}

TEST(MpiCommunicatorTest, Slow) {
  MpiRank self;
  self.comm().barrier("start");
  if (self.rank() == 1) {
    std::this_thread::sleep_for(std::chrono::seconds(4));
  } else {
    EXPECT_THAT(told([&] { self.comm().barrier("step"); }),
                testing::AllOf(testing::HasSubstr("all_gather of 0 U8 (step)"),
                               testing::HasSubstr("for rank 1")));
  }
}

TEST(MpiCommunicatorTest, Abort) {
  MpiRank self;
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

TEST(MpiCommunicatorTest, World) {
  RankIds ids = read_rank_ids(process_environment);
  const int made = ids.world_size++;
  EXPECT_THAT(told([&] { join_through_mpi(ids, {.issue = issue}); }),
              testing::HasSubstr(std::to_string(ids.rank) + " of " + std::to_string(made)));
}

TEST(MpiCommunicatorTest, Killed) {
  MpiRank self;
  self.comm().barrier("start");
  if (self.rank() == 1) ::raise(SIGKILL);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THAT(told([&] { self.comm().barrier("step"); }),
              testing::HasSubstr("rank 1 has given no sign of life"));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(15));
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

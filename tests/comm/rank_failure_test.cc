// What the ranks of a run are told when one of them goes wrong. Nobody ends the others: they must
// find out by themselves.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <vector>

#include "tests/support/process.h"

namespace orlop::test {
namespace {

constexpr int kRanks = 3;

struct Case {
  const char* mode;
  int told;  // ranks that get an error, which names all of `names`
  std::vector<std::string> names;
  int seconds = 30;  // at most
};

std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.mode; }

std::string name_of(const testing::TestParamInfo<Case>& info) { return info.param.mode; }

// The number of ranks that `run` says are told what the case expects.
int count_told(ChildProcess& run, const Case& expected) {
  int told = 0;
  while (const auto line = run.read_line()) {
    EXPECT_THAT(*line, testing::Not(testing::HasSubstr("FAILED")));
    if (!line->starts_with("told: ")) continue;
    for (const std::string& name : expected.names) EXPECT_THAT(*line, testing::HasSubstr(name));
    ++told;
  }
  run.wait();
  return told;
}

class RankFailure : public testing::TestWithParam<Case> {
 protected:
  void TearDown() override {
    EXPECT_LT(std::chrono::steady_clock::now() - begin_, std::chrono::seconds(GetParam().seconds));
  }

 private:
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

const Case kDisagree{
    "disagree",
    3,
    {"rank 0 calls all_gather of 10 F32 (layer.3)", "rank 1 calls all_gather of 9 F32 (layer.3)"}};
// Case D-06.
const Case kSkipped{
    "skipped",
    3,
    {"rank 0 calls all_gather of 10 F32 (layer.7)", "rank 1 calls all_gather of 10 F32 (layer.8)",
     "had last completed all_gather of 10 F32 (layer.6), number 7 of its queue, after "
     "all_gather of 10 F32 (layer.5)"}};
// Case D-02: who waits for whom, and in what.
const Case kSlow{"slow", 2, {"all_gather of 0 U8 (step)", "for rank 1"}};
const Case kAbort{"abort", 5, {"rank 1 has failed: out of paper"}};
const Case kLeaving{"leaving", 2, {"rank 1 has left the run"}};

using SocketRankFailure = RankFailure;

TEST_P(SocketRankFailure, EveryOtherRankIsTold) {
  int told = 0;
  for (const auto& run : start_socket_ranks(kRanks, {ORLOP_COMM_WORKER, GetParam().mode})) {
    told += count_told(*run, GetParam());
  }
  EXPECT_EQ(told, GetParam().told);
}

INSTANTIATE_TEST_SUITE_P(, SocketRankFailure,
                         testing::Values(kDisagree, kSkipped, kSlow, kAbort, kLeaving,
                                         Case{
                                             "killed", 2, {"rank 1 has ended without a word"}, 10}),
                         name_of);

#ifdef ORLOP_MPIEXEC

using MpiRankFailure = RankFailure;

TEST_P(MpiRankFailure, EveryOtherRankIsTold) {
  ChildProcess run(mpi_command(ORLOP_MPIEXEC, kRanks, {ORLOP_COMM_WORKER, GetParam().mode}));
  EXPECT_EQ(count_told(run, GetParam()), GetParam().told);
}

INSTANTIATE_TEST_SUITE_P(
    , MpiRankFailure,
    testing::Values(kDisagree, kSkipped, kSlow, kAbort, kLeaving,
                    Case{"world", 3, {"mpirun says rank", "of 4, but MPI has made rank", "of 3: "}},
                    Case{"killed", 2, {"rank 1 has given no sign of life"}}),
    name_of);

#endif

}  // namespace
}  // namespace orlop::test

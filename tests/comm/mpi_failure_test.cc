// What the ranks of an MPI run are told when one of them goes wrong. The launcher is told to keep
// the others alive, so that they must find out by themselves.

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
};

std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.mode; }

class MpiFailureTest : public testing::TestWithParam<Case> {};

TEST_P(MpiFailureTest, EveryOtherRankIsTold) {
  const std::vector<std::string> command =
      mpi_command(ORLOP_MPIEXEC, kRanks, {ORLOP_MPI_WORKER, GetParam().mode});
  const auto begin = std::chrono::steady_clock::now();
  ChildProcess run(command);
  int told = 0;
  while (const auto line = run.read_line()) {
    EXPECT_THAT(*line, testing::Not(testing::HasSubstr("FAILED")));
    if (!line->starts_with("told: ")) continue;
    for (const std::string& name : GetParam().names) {
      EXPECT_THAT(*line, testing::HasSubstr(name));
    }
    ++told;
  }
  run.wait();
  EXPECT_EQ(told, GetParam().told);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
}

INSTANTIATE_TEST_SUITE_P(
    , MpiFailureTest,
    testing::Values(Case{"disagree",
                         3,
                         {"rank 0 calls all_gather of 10 F32 (layer.3)",
                          "rank 1 calls all_gather of 9 F32 (layer.3)"}},
                    Case{"slow", 2, {"all_gather of 0 U8 (step)", "for rank 1"}},
                    Case{"abort", 5, {"rank 1 has failed: out of paper"}},
                    Case{"world", 3, {"mpirun says rank", "of 4, but MPI has made rank", "of 3: "}},
                    Case{"killed", 2, {"rank 1 has given no sign of life"}}),
    [](const auto& info) { return std::string(info.param.mode); });

}  // namespace
}  // namespace orlop::test

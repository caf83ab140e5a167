// Ranks on two hosts that a cable joins, by sockets and by MPI over TCP: the losses of one rank,
// and an end in good order when the cable is cut. The hosts are network namespaces of this machine
// (two_hosts.sh).

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "tests/formats/support.h"
#include "tests/support/process.h"
#include "tests/support/tiny_model.h"

namespace orlop::test {
namespace {

constexpr int kSteps = 8;  // of the shortest run, that under a sanitizer

std::string read_all(ChildProcess& process) {
  std::string output;
  while (const auto line = process.read_line()) output += *line + '\n';
  return output;
}

// The parameter is what starts the ranks: mpiexec, or "sockets".
class TwoHosts : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    ChildProcess probe({"/bin/sh", "-c", "'" ORLOP_TWO_HOSTS "' check 2>&1"});
    const std::string reason = read_all(probe);
    if (probe.wait() != 0) GTEST_SKIP() << "no network namespaces here: " << reason;
    write_tiny_model(model(), TinyFamily::kLlamaTied);
  }
  std::string model() const { return (folder_ / "model").string(); }
  std::string folder() const { return folder_.path().string(); }

 private:
  TempFolder folder_;
};

// Each step at least reduces the gradients of all weights over the ranks.
TEST_P(TwoHosts, GiveTheLossesOfOneRank) {
  const auto weights = std::filesystem::file_size(folder() + "/model/model.safetensors");
  for (const int ranks_each : {1, 2}) {
    ChildProcess run({ORLOP_TWO_HOSTS, "run", std::to_string(ranks_each), GetParam(),
                      ORLOP_RANK_WORKER, "alike", model()});
    std::map<std::string, int> ranks_on;
    size_t cable_bytes = 0;
    std::string output;
    while (const auto line = run.read_line()) {
      output += *line + '\n';
      if (line->starts_with("rank on ")) ++ranks_on[line->substr(8)];
      if (line->starts_with("cable ")) cable_bytes = std::stoull(line->substr(6));
    }
    ASSERT_EQ(run.wait(), 0) << output;
    EXPECT_THAT(ranks_on, testing::ElementsAre(testing::Pair("orlop-a", ranks_each),
                                               testing::Pair("orlop-b", ranks_each)));
    EXPECT_GT(cable_bytes, kSteps * weights) << ranks_each << " ranks on each host";
  }
}

TEST_P(TwoHosts, EndWhenTheCableIsCut) {
  ChildProcess run({ORLOP_TWO_HOSTS, "part", folder(), GetParam(), ORLOP_RANK_WORKER, "parted",
                    model(), folder()});
  const std::string output = read_all(run);
  ASSERT_EQ(run.wait(), 0) << output;
  for (const int rank : {0, 1}) {
    std::ifstream file(folder() + "/ended-" + std::to_string(rank));
    std::string told;
    std::string word;
    double seconds = 0;
    ASSERT_TRUE(std::getline(file, told) && file >> word >> seconds);
    EXPECT_THAT(told, testing::HasSubstr("rank " + std::to_string(1 - rank) +
                                         " has given no sign of life"));
    EXPECT_LT(seconds, 30.0);
  }
}

INSTANTIATE_TEST_SUITE_P(Sockets, TwoHosts, testing::Values("sockets"));
#ifdef ORLOP_MPIEXEC
INSTANTIATE_TEST_SUITE_P(Mpi, TwoHosts, testing::Values(ORLOP_MPIEXEC));
#endif

}  // namespace
}  // namespace orlop::test

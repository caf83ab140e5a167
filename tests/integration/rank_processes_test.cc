// The engine on ranks that are processes: the same bits as on threads, and an end in good order
// when one of them dies.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "orlop/engine.h"
#include "tests/formats/support.h"
#include "tests/support/process.h"
#include "tests/support/rank_run.h"
#include "tests/support/tiny_model.h"

namespace orlop::test {
namespace {

using Processes = std::vector<std::unique_ptr<ChildProcess>>;

// How the processes of a run are started, and what those who survive are told of one that is
// killed.
struct Launch {
  const char* name;
  Processes (*start)(int ranks, const std::vector<std::string>& program);
  const char* told;
};

std::ostream& operator<<(std::ostream& out, const Launch& launch) { return out << launch.name; }

class RankProcesses : public ::testing::TestWithParam<Launch> {
 protected:
  RankProcesses() { write_tiny_model(folder_ / "model", TinyFamily::kLlamaTied); }
  std::string model() const { return (folder_ / "model").string(); }

  static Processes start(int ranks, std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), ORLOP_RANK_WORKER);
    return GetParam().start(ranks, arguments);
  }

  TempFolder folder_;
};

TEST_P(RankProcesses, ComputeTheBitsOfRanksOnThreads) {
  for (const int ranks : {1, 2, 3, 4}) {
    for (const auto& run : start(ranks, {"equal", model()})) {
      std::string output;
      while (const auto line = run->read_line()) output += *line + '\n';
      EXPECT_EQ(run->wait(), 0) << ranks << " ranks:\n" << output;
    }
  }
}

// Case D-10: nobody waits for longer than 30 s, and what the dead rank had on the drive is gone
// with it.
TEST_P(RankProcesses, EndWhenOneIsKilledAndResumeOnFewer) {
  const std::string run_dir = (folder_ / "run").string();
  std::filesystem::create_directories(folder_ / "run" / "swap");
  int told = 0;
  int ended = 0;
  for (const auto& run : start(3, {"killed", model(), run_dir})) {
    while (const auto line = run->read_line()) {
      if (line->starts_with("told: ")) {
        EXPECT_THAT(*line, testing::HasSubstr(GetParam().told));
        ++told;
      } else if (line->starts_with("ended ")) {
        EXPECT_LT(std::stod(line->substr(6)), 30.0);
        ++ended;
      }
    }
  }
  EXPECT_EQ(told, 2);
  EXPECT_EQ(ended, 2);
  EXPECT_TRUE(std::filesystem::is_empty(folder_ / "run" / "swap"));

  const std::string checkpoint = Engine::latest_checkpoint(run_dir);
  ASSERT_FALSE(checkpoint.empty());
  EngineConfig config = tiny_engine_config(Precision::kBF16);
  config.batch.micro_batch_size = 1;
  config.batch.accumulation_steps = 12;
  run_engines(2, model(), config, [&](Engine& engine) {
    EXPECT_EQ(engine.load_checkpoint(checkpoint), "5");
    EXPECT_EQ(engine.steps_done(), 5);
    run_share(engine, 12, {.from = 6, .until = 7, .last = 7});
    EXPECT_EQ(engine.steps_done(), 7);
  });
}

std::string name_of(const testing::TestParamInfo<Launch>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(, RankProcesses,
                         testing::Values(Launch{"sockets", start_socket_ranks,
                                                "rank 1 has ended without a word"}),
                         name_of);

#ifdef ORLOP_MPIEXEC

Processes start_mpi_ranks(int ranks, const std::vector<std::string>& program) {
  Processes launcher;
  launcher.push_back(std::make_unique<ChildProcess>(mpi_command(ORLOP_MPIEXEC, ranks, program)));
  return launcher;
}

INSTANTIATE_TEST_SUITE_P(Mpi, RankProcesses,
                         testing::Values(Launch{"mpi", start_mpi_ranks,
                                                "rank 1 has given no sign of life"}),
                         name_of);

#endif

}  // namespace
}  // namespace orlop::test

// The engine on ranks that are processes: the same bits as on threads, and an end in good order
// when one of them dies.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "orlop/engine.h"
#include "tests/formats/support.h"
#include "tests/support/process.h"
#include "tests/support/rank_run.h"
#include "tests/support/tiny_model.h"

namespace orlop::test {
namespace {

std::vector<std::string> launch(int ranks, const std::vector<std::string>& arguments) {
  std::vector<std::string> program = {ORLOP_RANK_WORKER};
  program.insert(program.end(), arguments.begin(), arguments.end());
  return mpi_command(ORLOP_MPIEXEC, ranks, program);
}

class MpiRanks : public ::testing::Test {
 protected:
  MpiRanks() { write_tiny_model(folder_ / "model", TinyFamily::kLlamaTied); }
  std::string model() const { return (folder_ / "model").string(); }

  TempFolder folder_;
};

TEST_F(MpiRanks, ComputeTheBitsOfRanksOnThreads) {
  for (const int ranks : {1, 2, 3, 4}) {
    ChildProcess run(launch(ranks, {"equal", model()}));
    std::string output;
    while (const auto line = run.read_line()) output += *line + '\n';
    EXPECT_EQ(run.wait(), 0) << ranks << " ranks:\n" << output;
  }
}

TEST_F(MpiRanks, EndWhenOneIsKilledAndResumeOnFewer) {
  const std::string run_dir = (folder_ / "run").string();
  ChildProcess run(launch(3, {"killed", model(), run_dir}));
  int told = 0;
  int ended = 0;
  while (const auto line = run.read_line()) {
    if (line->starts_with("told: ")) {
      EXPECT_THAT(*line, testing::HasSubstr("rank 1 has given no sign of life"));
      ++told;
    } else if (line->starts_with("ended ")) {
      EXPECT_LT(std::stod(line->substr(6)), 30.0);
      ++ended;
    }
  }
  EXPECT_EQ(told, 2);
  EXPECT_EQ(ended, 2);

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

}  // namespace
}  // namespace orlop::test

// One rank of a run that mpirun starts.
//   rank_worker equal MODEL           trains and compares every bit with the same run on threads
//   rank_worker killed MODEL RUN_DIR  trains and saves; rank 1 is killed after step 5, the others
//                                     print "told: <error>" and "ended <seconds>"

#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <iostream>
#include <string>

#include "orlop/engine.h"
#include "tests/support/rank_run.h"

namespace orlop::test {
namespace {

constexpr int64_t kAllMicroBatches = 12;

EngineConfig config_for(int64_t ranks) {
  EngineConfig config = tiny_engine_config(Precision::kBF16);
  config.batch.micro_batch_size = 1;
  config.batch.accumulation_steps = (kAllMicroBatches + ranks - 1) / ranks;
  config.placement.device_optimizer_blocks = 2;
  config.placement.resident_blocks = 3;
  return config;
}

int64_t ranks_of_environment() { return std::stoll(std::getenv("OMPI_COMM_WORLD_SIZE")); }

int compare(const std::string& model) {
  const RunOptions options{.until = 5, .last = 5};
  const int64_t ranks = ranks_of_environment();
  const auto engine = Engine::open(model, config_for(ranks));
  const RunRecord found = run_share(*engine, kAllMicroBatches, options);
  EngineConfig all = config_for(ranks);
  all.batch.accumulation_steps = kAllMicroBatches;
  const RunRecord expected = run_on_ranks(static_cast<int>(ranks), model, all, options);
  EXPECT_EQ(engine->world_size(), ranks);
  EXPECT_TRUE(same_bits(expected, found));
  return ::testing::Test::HasFailure() ? 1 : 0;
}

int train_until_killed(const std::string& model, const std::string& run_dir) {
  using Clock = std::chrono::steady_clock;
  Clock::time_point last_step;
  try {
    const auto engine = Engine::open(model, config_for(ranks_of_environment()));
    for (int64_t step = 1;; ++step) {
      run_share(*engine, kAllMicroBatches, {.from = step, .until = step, .last = 0});
      engine->save_checkpoint(run_dir, std::to_string(step), 2);
      if (step == 5 && engine->rank() == 1) ::raise(SIGKILL);
      last_step = Clock::now();
    }
  } catch (const std::exception& error) {
    std::cout << "told: " << error.what() << std::endl;
  }
  std::cout << "ended " << std::chrono::duration<double>(Clock::now() - last_step).count()
            << std::endl;
  return 0;
}

}  // namespace
}  // namespace orlop::test

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  try {
    if (mode == "equal" && argc == 3) return orlop::test::compare(argv[2]);
    if (mode == "killed" && argc == 4) return orlop::test::train_until_killed(argv[2], argv[3]);
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
  std::cerr << "usage: rank_worker equal MODEL | killed MODEL RUN_DIR\n";
  return 2;
}

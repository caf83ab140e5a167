// One rank of a run of processes, by MPI or by sockets as the environment says.
//   rank_worker equal MODEL
//     trains and compares every bit with the same run on threads
//   rank_worker alike MODEL
//     trains in fp32 and compares the losses with those of one rank; prints "rank on <host>"
//   rank_worker killed MODEL RUN_DIR
//     trains and saves, with states on a drive in RUN_DIR/swap; rank 1 is killed after step 5, the
//     others print "told: <error>" and "ended <seconds>"
//   rank_worker parted MODEL FOLDER
//     trains until an error; rank 0 makes FOLDER/trained after step 5, each rank writes the same
//     two lines into FOLDER/ended-<rank>

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <string>

#include "orlop/engine.h"
#include "orlop/ranks.h"
#include "tests/support/rank_run.h"

namespace orlop::test {
namespace {

constexpr int64_t kAllMicroBatches = 12;

EngineConfig config_for(int64_t ranks, DType gradient_wire = DType::kF32) {
  EngineConfig config = tiny_engine_config(Precision::kBF16);
  config.gradient_wire = gradient_wire;
  config.batch.micro_batch_size = 1;
  config.batch.accumulation_steps = (kAllMicroBatches + ranks - 1) / ranks;
  config.placement.device_optimizer_blocks = 2;
  config.placement.resident_blocks = 3;
  return config;
}

int compare(const std::string& model) {
  const int64_t ranks = Ranks().world_size();
  for (const DType wire : {DType::kF32, DType::kBF16}) {
    const int64_t steps = wire == DType::kF32 ? 5 : 2;
    const RunOptions options{.until = steps, .last = steps};
    const auto engine = Engine::open(model, config_for(ranks, wire));
    const RunRecord found = run_share(*engine, kAllMicroBatches, options);
    EngineConfig all = config_for(ranks, wire);
    all.batch.accumulation_steps = kAllMicroBatches;
    const RunRecord expected = run_on_ranks(static_cast<int>(ranks), model, all, options);
    EXPECT_EQ(engine->world_size(), ranks);
    EXPECT_TRUE(same_bits(expected, found)) << "gradients travel as " << dtype_name(wire);
  }
  return ::testing::Test::HasFailure() ? 1 : 0;
}

int compare_with_one_rank(const std::string& model) {
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  EngineConfig config = tiny_engine_config(Precision::kF32);
  config.batch.micro_batch_size = 1;
  config.optimizer.learning_rate = 1e-4;
  config.batch.accumulation_steps = kAllMicroBatches;
  const RunRecord single = run_on_ranks(1, model, config, {});
  const int64_t ranks = Ranks().world_size();
  config.batch.accumulation_steps /= ranks;
  const auto engine = Engine::open(model, config);
  const RunRecord found = run_share(*engine, kAllMicroBatches, {});
  EXPECT_EQ(engine->world_size(), ranks);
  EXPECT_TRUE(close_losses(single, found));
  std::cout << "rank on " << host.data() << std::endl;
  return ::testing::Test::HasFailure() ? 1 : 0;
}

using Clock = std::chrono::steady_clock;

// Trains until an error of the run, which it writes to `out` with the seconds that it came after
// the last step. `after_step` may end this process.
int train_until_told(const std::string& model, const EngineConfig& config, std::ostream& out,
                     const std::function<void(Engine&, int64_t step)>& after_step) {
  Clock::time_point last_step;
  try {
    const auto engine = Engine::open(model, config);
    for (int64_t step = 1;; ++step) {
      run_share(*engine, kAllMicroBatches, {.from = step, .until = step, .last = 0});
      after_step(*engine, step);
      last_step = Clock::now();
    }
  } catch (const std::exception& error) {
    out << "told: " << error.what() << std::endl;
  }
  out << "ended " << std::chrono::duration<double>(Clock::now() - last_step).count() << std::endl;
  return 0;
}

int train_until_killed(const std::string& model, const std::string& run_dir) {
  EngineConfig config = config_for(Ranks().world_size());
  config.nvme.paths = {run_dir + "/swap"};
  config.placement.nvme_optimizer_blocks = 3;
  return train_until_told(model, config, std::cout, [&](Engine& engine, int64_t step) {
    engine.save_checkpoint(run_dir, std::to_string(step), 2);
    if (step == 5 && engine.rank() == 1) ::raise(SIGKILL);
  });
}

int train_until_parted(const std::string& model, const std::filesystem::path& folder) {
  const std::string rank = std::to_string(Ranks().rank());
  const std::filesystem::path unfinished = folder / ("telling-" + rank);
  {
    std::ofstream out(unfinished);
    train_until_told(model, config_for(Ranks().world_size()), out,
                     [&](Engine& engine, int64_t step) {
                       if (step == 5 && engine.rank() == 0) std::ofstream(folder / "trained");
                     });
  }
  std::filesystem::rename(unfinished, folder / ("ended-" + rank));
  return 0;
}

}  // namespace
}  // namespace orlop::test

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  try {
    if (mode == "equal" && argc == 3) return orlop::test::compare(argv[2]);
    if (mode == "alike" && argc == 3) return orlop::test::compare_with_one_rank(argv[2]);
    if (mode == "killed" && argc == 4) return orlop::test::train_until_killed(argv[2], argv[3]);
    if (mode == "parted" && argc == 4) return orlop::test::train_until_parted(argv[2], argv[3]);
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
  std::cerr << "usage: rank_worker equal|alike MODEL | killed|parted MODEL FOLDER\n";
  return 2;
}

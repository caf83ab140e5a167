// Saves that run beside training: what they write, whom they hold, and how they fail.

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include "orlop/engine.h"
#include "tests/formats/support.h"
#include "tests/nvme/mounts.h"
#include "tests/support/engine_run.h"
#include "tests/support/tiny_model.h"

namespace orlop::test {
namespace {

namespace fs = std::filesystem;

constexpr const char* kStatesFile = "optim/rank-0.safetensors";
constexpr int64_t kSteps = kSanitized ? 3 : 4;

// Large enough that a save outlasts the start of the next step's updates.
constexpr TinyShape kShape = {.vocab = kSanitized ? 500 : 2000,
                              .hidden = 160,
                              .layers = 3,
                              .heads = 4,
                              .kv_heads = 2,
                              .intermediate = 320,
                              .positions = 48};

struct Placement {
  const char* name;
  std::function<void(EngineConfig&)> apply;
};

void swap_states(EngineConfig& config, int states, int weights) {
  static const TempFolder folder;
  config.nvme.paths = {folder.path().string()};
  config.placement.nvme_optimizer_blocks = states;
  config.placement.nvme_param_blocks = weights;
  config.placement.swap_chunk = 65536;
}

const Placement kPlacements[] = {
    {"states on the host", [](EngineConfig& c) { c.placement.device_optimizer_blocks = 0; }},
    {"part of the states on the device",
     [](EngineConfig& c) { c.placement.device_optimizer_blocks = 3; }},
    {"states on the device", [](EngineConfig& c) { c.placement.device_optimizer_blocks = 5; }},
    {"updates inside backward", [](EngineConfig& c) { c.optimizer.max_grad_norm = 0; }},
    {"updates inside backward, partly on the device",
     [](EngineConfig& c) {
       c.optimizer.max_grad_norm = 0;
       c.placement.device_optimizer_blocks = 2;
     }},
    {"a snapshot of some blocks",
     [](EngineConfig& c) {
       c.limits.snapshot_bytes = size_t{6} << 20;
       c.placement.device_optimizer_blocks = 1;
     }},
    {"a snapshot of all", [](EngineConfig& c) { c.limits.snapshot_bytes = size_t{1} << 30; }},
    {"updates beside the next forward", [](EngineConfig& c) { c.threads = 5; }},
    {"states on a drive", [](EngineConfig& c) { swap_states(c, 5, 0); }},
    {"states on a drive, updates inside backward",
     [](EngineConfig& c) {
       swap_states(c, 3, 3);
       c.optimizer.max_grad_norm = 0;
     }},
    {"a snapshot of states of which part is on a drive", [](EngineConfig& c) {
       swap_states(c, 5, 5);
       c.placement.nvme_optimizer_share = 0.7;
       c.placement.nvme_param_share = 0.4;
       c.limits.snapshot_bytes = size_t{8} << 20;
     }}};

class BackgroundSaveTest : public ::testing::Test {
 protected:
  BackgroundSaveTest() { write_tiny_model(folder_ / "model", TinyFamily::kLlama, kShape); }

  std::unique_ptr<Engine> open(const EngineConfig& config) const {
    return Engine::open((folder_ / "model").string(), config);
  }

  // Trains and saves after every step.
  RunRecord run_saving(const EngineConfig& config, const fs::path& run_dir, SaveMode mode) const {
    const auto engine = open(config);
    RunRecord record;
    for (int64_t step = 1; step <= kSteps; ++step) {
      const RunRecord one = run_one(*engine, step);
      record.losses.push_back(one.losses.front());
      record.norms.push_back(one.norms.front());
      record.skipped.push_back(one.skipped.front());
      engine->save_checkpoint(run_dir.string(), std::to_string(step), kSteps, mode);
    }
    record.states = read_states(*engine);
    return record;
  }

  static RunRecord run_one(Engine& engine, int64_t step) {
    RunRecord record;
    const StepResult result = engine.step(batches_of_step(engine.config(), kShape.vocab, step));
    record.losses.push_back(result.loss);
    record.norms.push_back(result.grad_norm);
    record.skipped.push_back(result.skipped);
    return record;
  }

  TempFolder folder_;
};

// Case C-14, with the tests below: what is written is the step of the call.
TEST_F(BackgroundSaveTest, WritesWhatASaveThatWaitsWritesAndChangesNoBit) {
  for (const Placement& placement : kPlacements) {
    EngineConfig config = tiny_engine_config(Precision::kBF16);
    placement.apply(config);
    const fs::path waiting = folder_ / "waiting";
    const fs::path beside = folder_ / "beside";
    const RunRecord expected = run_saving(config, waiting, SaveMode::kWait);
    EXPECT_TRUE(same_bits(expected, run_saving(config, beside, SaveMode::kBackground)))
        << placement.name;
    for (int64_t step = 1; step <= kSteps; ++step) {
      const std::string name = "step-" + std::to_string(step);
      EXPECT_TRUE(slurp(waiting / name / kStatesFile) == slurp(beside / name / kStatesFile))
          << placement.name << ", " << name;
    }
    fs::remove_all(waiting);
    fs::remove_all(beside);
  }
}

// Case C-14: the call ends long before what it writes is on the drive. The shortest of a few calls
// counts, for a machine that is busy elsewhere holds one or the other up.
TEST_F(BackgroundSaveTest, ReturnsBeforeTheStatesAreWritten) {
  const auto engine = open(tiny_engine_config(Precision::kBF16));
  const auto shortest_call = [&](SaveMode mode) {
    double shortest = 1e9;
    for (int i = 0; i < 5; ++i) {
      run_one(*engine, 1);
      engine->synchronize();
      const auto begin = std::chrono::steady_clock::now();
      engine->save_checkpoint((folder_ / "run").string(), "", 1, mode);
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
      shortest = std::min(shortest, took.count());
      engine->wait_for_save();
    }
    return shortest;
  };
  const double waiting = shortest_call(SaveMode::kWait);
  const double beside = shortest_call(SaveMode::kBackground);
  std::printf("%.2f ms until a save is written, %.2f ms until it is begun\n", 1e3 * waiting,
              1e3 * beside);
  EXPECT_LT(beside, waiting / 4);
}

TEST_F(BackgroundSaveTest, IsOverBeforeTheNextLoadSaveAndEnd) {
  const EngineConfig config = tiny_engine_config(Precision::kBF16);
  const fs::path run_dir = folder_ / "run";
  const auto save = [&](Engine& engine, const char* state, SaveMode mode) {
    return engine.save_checkpoint(run_dir.string(), state, 3, mode);
  };
  auto engine = open(config);
  run_one(*engine, 1);
  const std::string first = save(*engine, "first", SaveMode::kBackground);
  const States at_first = read_states(*engine);
  run_one(*engine, 2);
  EXPECT_EQ(engine->load_checkpoint(first), "first");
  EXPECT_TRUE(same_states(at_first, read_states(*engine)));

  run_one(*engine, 2);
  const std::string second = save(*engine, "second", SaveMode::kBackground);
  run_one(*engine, 3);
  const std::string third = save(*engine, "third", SaveMode::kWait);
  EXPECT_TRUE(fs::exists(fs::path(second) / "manifest.json"));
  EXPECT_EQ(Engine::latest_checkpoint(run_dir.string()), third);

  run_one(*engine, 4);
  const std::string fourth = save(*engine, "fourth", SaveMode::kBackground);
  const States at_end = read_states(*engine);
  engine.reset();
  EXPECT_EQ(Engine::latest_checkpoint(run_dir.string()), fourth);
  const auto resumed = open(config);
  EXPECT_EQ(resumed->load_checkpoint(fourth), "fourth");
  EXPECT_TRUE(same_states(at_end, read_states(*resumed)));
}

TEST_F(BackgroundSaveTest, AFailureReachesTheNextCallOnceAndTheRunGoesOn) {
  EngineConfig config = tiny_engine_config(Precision::kBF16);
  config.placement.device_optimizer_blocks = 2;
  const auto straight = open(config);
  for (int64_t step = 1; step <= 4; ++step) run_one(*straight, step);
  spill(folder_ / "file", "in the way");
  const std::string nowhere = (folder_ / "file" / "run").string();

  const auto engine = open(config);
  run_one(*engine, 1);
  engine->save_checkpoint(nowhere, "", 1, SaveMode::kBackground);
  EXPECT_NE(error_of(ErrorCode::kIo, [&] { engine->wait_for_save(); }).find(nowhere),
            std::string::npos);
  engine->wait_for_save();
  run_one(*engine, 2);

  engine->save_checkpoint(nowhere, "", 1, SaveMode::kBackground);
  const std::string text = error_of(ErrorCode::kIo, [&] {
    engine->save_checkpoint((folder_ / "run").string(), "", 1, SaveMode::kBackground);
  });
  EXPECT_NE(text.find("save of step 2"), std::string::npos) << text;
  EXPECT_FALSE(fs::exists(folder_ / "run")) << "nothing is started instead";

  engine->save_checkpoint(nowhere, "", 1, SaveMode::kBackground);
  const std::string later = error_of(ErrorCode::kIo, [&] {
    for (;;) engine->evaluate(batches_of_step(config, kShape.vocab, 1));
  });
  EXPECT_NE(later.find(nowhere), std::string::npos) << later;
  for (int64_t step = 3; step <= 4; ++step) run_one(*engine, step);
  EXPECT_TRUE(same_states(read_states(*straight), read_states(*engine)));
}

TEST_F(BackgroundSaveTest, AFullDiskLeavesTheLastCheckpoint) {
  auto mount = nvme::Mount::tmpfs(64);
  ORLOP_SKIP_UNLESS_MOUNTED(mount);
  const auto engine = open(tiny_engine_config(Precision::kBF16));
  run_one(*engine, 1);
  const std::string intact = engine->save_checkpoint(mount.path(), "", 1, SaveMode::kBackground);
  engine->wait_for_save();
  const fs::space_info space = fs::space(mount.path());
  spill(fs::path(mount.path()) / "ballast", std::string(space.available - 20000, 'x'));
  run_one(*engine, 2);
  engine->save_checkpoint(mount.path(), "", 1, SaveMode::kBackground);
  error_of(ErrorCode::kIo, [&] { engine->wait_for_save(); });
  EXPECT_EQ(Engine::latest_checkpoint(mount.path()), intact);
  fs::remove(fs::path(mount.path()) / "ballast");
  run_one(*engine, 3);
  engine->save_checkpoint(mount.path(), "", 1, SaveMode::kBackground);
  engine->wait_for_save();
  EXPECT_TRUE(Engine::latest_checkpoint(mount.path()).ends_with("step-3"));
}

}  // namespace
}  // namespace orlop::test

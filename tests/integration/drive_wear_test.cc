// The ranks of a machine wear its drives together.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <mutex>
#include <string>
#include <vector>

#include "orlop/error.h"
#include "tests/formats/support.h"
#include "tests/support/rank_run.h"
#include "tests/support/tiny_model.h"

namespace orlop::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kRanks = 2;

class DriveWearTest : public ::testing::Test {
 protected:
  DriveWearTest() {
    write_tiny_model(folder_ / "model", TinyFamily::kLlama);
    config_ = tiny_engine_config(Precision::kBF16);
    config_.batch.micro_batch_size = 1;
    config_.batch.accumulation_steps = kAll / kRanks;
    config_.nvme.paths = {(folder_ / "swap").string()};
    config_.placement.nvme_optimizer_blocks = 5;
    config_.placement.nvme_param_blocks = 3;
    config_.placement.swap_chunk = 4096;
  }

  std::string model() const { return (folder_ / "model").string(); }
  std::string run_dir() const { return (folder_ / "run").string(); }

  // The steps that each rank makes until one is refused, at most nine, and why; what is there then
  // is saved.
  struct Stopped {
    std::vector<int64_t> steps;
    std::vector<std::string> reasons;
  };
  Stopped run_until_refused() {
    Stopped stopped;
    std::mutex mutex;
    run_engines(kRanks, model(), config_, [&](Engine& engine) {
      std::string reason;
      int64_t steps = 0;
      try {
        for (; steps < 9; ++steps) run_share(engine, kAll, {.from = steps + 1, .until = steps + 1});
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kDoesNotFit) << error.what();
        reason = error.what();
      }
      engine.save_checkpoint(run_dir(), "", 1);
      const std::lock_guard lock(mutex);
      stopped.steps.push_back(engine.steps_done());
      stopped.reasons.push_back(reason);
    });
    return stopped;
  }

  static constexpr int64_t kAll = 4;  // micro-batches of a step
  EngineConfig config_;
  TempFolder folder_;
};

TEST_F(DriveWearTest, TheLimitOfADayIsOneForAllRanksAndStopsThemAtTheSameStep) {
  const size_t of_rank = Engine::plan(model(), config_, kRanks).nvme_written_bytes;
  // Loading writes all states about once; with one rank's writes alone twice as many steps would
  // fit.
  config_.limits.nvme_writes_per_day_bytes = 6 * kRanks * of_rank;
  const Stopped stopped = run_until_refused();
  ASSERT_EQ(stopped.steps.size(), static_cast<size_t>(kRanks));
  EXPECT_GE(stopped.steps[0], 3);
  EXPECT_LE(stopped.steps[0], 5);
  EXPECT_EQ(stopped.steps[0], stopped.steps[1]);
  EXPECT_EQ(stopped.reasons[0], stopped.reasons[1]);
  EXPECT_THAT(stopped.reasons[0], AllOf(HasSubstr("limits.nvme_writes_per_day is"),
                                        HasSubstr("by 2 ranks on the machine of rank 0"),
                                        HasSubstr("raise the limit")));

  // A run of one rank has nothing left of the day, and goes on with a higher limit.
  config_.batch.accumulation_steps = kAll;
  const auto refused = Engine::open(model(), config_);
  EXPECT_GT(refused->stats().nvme_written_today_bytes, 4 * kRanks * of_rank);
  EXPECT_THROW(run(*refused, {.until = 2}), Error);
}

TEST_F(DriveWearTest, TheRunGoesOnFromWhatWasSaved) {
  const size_t of_rank = Engine::plan(model(), config_, kRanks).nvme_written_bytes;
  config_.limits.nvme_writes_per_day_bytes = 5 * kRanks * of_rank;
  const int64_t steps = run_until_refused().steps.at(0);
  EXPECT_LT(steps, 9);
  config_.limits.nvme_writes_per_day_bytes = 100 * kRanks * of_rank;
  run_engines(kRanks, model(), config_, [&](Engine& engine) {
    engine.load_checkpoint(Engine::latest_checkpoint(run_dir()));
    EXPECT_EQ(engine.steps_done(), steps);
    run_share(engine, kAll, {.from = steps + 1, .until = 9});
    EXPECT_EQ(engine.steps_done(), 9);
  });
}

TEST_F(DriveWearTest, CountsAreThoseOfAllRanks) {
  const size_t of_rank = Engine::plan(model(), config_, kRanks).nvme_written_bytes;
  run_engines(kRanks, model(), config_, [&](Engine& engine) {
    run_share(engine, kAll, {.until = 1});
    engine.synchronize();
    const Stats before = engine.stats();
    run_share(engine, kAll, {.from = 2, .until = 3});
    engine.synchronize();
    // The other rank's are known up to the beginning of the last step.
    const uint64_t written = engine.stats().nvme_written_bytes - before.nvme_written_bytes;
    EXPECT_GE(written, 3 * of_rank);
    EXPECT_LE(written, 2 * kRanks * of_rank);
    EXPECT_GE(engine.stats().nvme_written_today_bytes, engine.stats().nvme_written_bytes);
  });
}

// A rank whose swap file something else has cut ends with an error that names the file; the others
// do not wait for it.
// Case S-02.
TEST_F(DriveWearTest, AFaultOfOneRanksDriveEndsTheOthers) {
  std::mutex mutex;
  std::vector<std::string> reasons(kRanks);
  const auto begin = std::chrono::steady_clock::now();
  run_engines(kRanks, model(), config_, [&](Engine& engine) {
    run_share(engine, kAll, {.until = 1});
    engine.synchronize();
    if (engine.rank() == 1) std::filesystem::resize_file(folder_ / "swap" / "orlop-r1.swap", 8192);
    try {
      run_share(engine, kAll, {.from = 2, .until = 6});
    } catch (const Error& error) {
      const std::lock_guard lock(mutex);
      reasons[static_cast<size_t>(engine.rank())] = error.what();
    }
  });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60));
  EXPECT_THAT(reasons[1], AllOf(HasSubstr("orlop-r1.swap"), HasSubstr("8192")));
  EXPECT_THAT(reasons[0], AllOf(HasSubstr("rank 1"), HasSubstr("orlop-r1.swap")));
}

}  // namespace
}  // namespace orlop::test

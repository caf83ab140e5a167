// Queues, drives and saves that fall behind each other at random: whatever overlaps in a step, and
// from one step to the next, its bits are those of a run in which nothing was late.

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <random>
#include <string>

#include "nvme/io_backend.h"
#include "orlop/engine.h"
#include "tests/formats/support.h"
#include "tests/nvme/faulty_backend.h"
#include "tests/support/delayed_backend.h"
#include "tests/support/engine_run.h"
#include "tests/support/rank_run.h"
#include "tests/support/tiny_model.h"

namespace orlop::test {
namespace {

constexpr int64_t kSteps = 6;
constexpr int64_t kSavedStep = 4;
// From here on the update of a step runs beside the forward pass of the next.
constexpr int kThreadsThatOverlap = 5;

// While it lives, every transfer of a new engine's drives comes up to 400 microseconds late.
class LateDrives {
 public:
  explicit LateDrives(uint64_t seed) {
    nvme::decorate_io_backends([seed](std::unique_ptr<nvme::IoBackend> backend) {
      return std::make_unique<nvme::FaultyBackend>(
          std::move(backend),
          [random = std::mt19937_64(seed)](const nvme::IoRequest&, uint64_t) mutable {
            return nvme::Fault::late(std::chrono::microseconds(random() % 400));
          });
    });
  }
  ~LateDrives() { nvme::decorate_io_backends(nullptr); }
  LateDrives(const LateDrives&) = delete;
  LateDrives& operator=(const LateDrives&) = delete;
};

struct Case {
  const char* name;
  double max_grad_norm = 1;  // 0: updates inside backward
  int nvme_blocks = 0;       // of whose states some are on a drive
  int device_optimizer_blocks = 0;
};

std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

class Delays : public ::testing::TestWithParam<Case> {
 protected:
  Delays() {
    write_tiny_model(folder_ / "model", TinyFamily::kLlamaTied);
    config_ = tiny_engine_config(Precision::kBF16);
    config_.optimizer.max_grad_norm = GetParam().max_grad_norm;
  }

  // What crosses every link in every step, with few buffers that take turns.
  EngineConfig overlapping() const {
    EngineConfig config = config_;
    config.threads = kThreadsThatOverlap;
    config.placement.resident_blocks = GetParam().device_optimizer_blocks;
    config.placement.device_optimizer_blocks = GetParam().device_optimizer_blocks;
    config.placement.prefetch_depth = 2;
    config.placement.wave = 2;
    config.placement.activations = Tier::kHost;
    if (GetParam().nvme_blocks > 0) {
      config.nvme.paths = {(folder_ / "swap").string()};
      config.placement.swap_chunk = 4096;
      config.placement.nvme_optimizer_blocks = GetParam().nvme_blocks;
      config.placement.nvme_param_blocks = GetParam().nvme_blocks - 1;
      config.placement.activations = Tier::kNvme;
    }
    return config;
  }

  std::string model() const { return (folder_ / "model").string(); }
  std::string run_dir() const { return (folder_ / "run").string(); }

  // A save in the background reads what the next updates want to write.
  RunRecord run_steps(const EngineConfig& config) const {
    const auto engine = Engine::open(model(), config);
    RunRecord record;
    for (int64_t step = 1; step <= kSteps; ++step) {
      const StepResult result = engine->step(batches_of_step(config, 61, step));
      record.losses.push_back(result.loss);
      record.norms.push_back(result.grad_norm);
      record.skipped.push_back(result.skipped);
      if (step == kSavedStep) engine->save_checkpoint(run_dir(), "", 1, SaveMode::kBackground);
    }
    record.states = read_states(*engine);
    return record;
  }

  // What the save has written goes on as the run that it was taken from.
  States states_from_the_save() const {
    const auto engine = Engine::open(model(), config_);
    engine->load_checkpoint(Engine::latest_checkpoint(run_dir()));
    return run(*engine, {.from = kSavedStep + 1, .until = kSteps}).states;
  }

  TempFolder folder_;
  EngineConfig config_;
};

TEST_P(Delays, OfEveryQueueChangeNoBit) {
  const RunRecord expected = run_steps(config_);
  for (const uint64_t seed : {1u, 2u}) {
    {
      const DelayedQueues queues(seed);
      const LateDrives drives(seed);
      EXPECT_TRUE(same_bits(expected, run_steps(overlapping()))) << "seed " << seed;
    }
    EXPECT_TRUE(same_states(expected.states, states_from_the_save())) << "seed " << seed;
  }
}

INSTANTIATE_TEST_SUITE_P(, Delays,
                         ::testing::Values(Case{"clipped"}, Case{"updates_in_backward", 0},
                                           Case{"some_updates_on_the_device", 1, 0, 2},
                                           Case{"drives", 1, 4},
                                           Case{"drives_and_updates_in_backward", 0, 4, 1}),
                         [](const auto& info) { return info.param.name; });

TEST(RanksWithDelays, ChangeNoBit) {
  if (test_device() != "host") GTEST_SKIP() << "ranks on threads have host queues";
  const TempFolder folder;
  write_tiny_model(folder.path(), TinyFamily::kLlama);
  EngineConfig config = tiny_engine_config(Precision::kBF16);
  config.batch.accumulation_steps = 4;
  config.threads = kThreadsThatOverlap;
  config.placement.resident_blocks = 0;
  config.placement.prefetch_depth = 1;
  const RunOptions options{.until = 4, .last = 4};
  const std::string model = folder.path().string();
  const RunRecord expected = run_on_ranks(2, model, config, options);
  const DelayedQueues queues(7);
  EXPECT_TRUE(same_bits(expected, run_on_ranks(2, model, config, options)));
}

}  // namespace
}  // namespace orlop::test

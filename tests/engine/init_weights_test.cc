// Weights of a run from scratch: their distribution, and that nothing but the seed decides them.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "tests/formats/support.h"
#include "tests/support/rank_run.h"
#include "tests/support/tiny_model.h"

namespace orlop::test {
namespace {

class InitWeights : public ::testing::TestWithParam<TinyFamily> {
 protected:
  InitWeights() {
    TinyShape shape;
    shape.hidden = 64;
    shape.intermediate = 176;
    spill(folder_ / "config.json", tiny_config(GetParam(), shape));
    config_ = tiny_engine_config(Precision::kBF16);
    config_.from_scratch = true;
  }

  States states(const EngineConfig& config) const {
    return read_states(*Engine::open(folder_.path().string(), config));
  }
  States states_on(int ranks) const {
    RunOptions options{.until = 0, .last = 0};
    return run_on_ranks(ranks, folder_.path().string(), config_, options).states;
  }

  EngineConfig config_;

 private:
  TempFolder folder_;
};

TEST_P(InitWeights, AreNormalWithUnitNormsAndNoBiases) {
  for (const auto& [name, values] : states(config_)) {
    if (!name.ends_with(".master")) {
      EXPECT_TRUE(std::all_of(values.begin(), values.end(), [](float v) { return v == 0; }))
          << name;
      continue;
    }
    const bool is_norm =
        name.find("norm") != std::string::npos || name.find("ln_") != std::string::npos;
    if (name.ends_with(".bias.master") || is_norm) {
      const float constant = name.ends_with(".bias.master") ? 0.0f : 1.0f;
      EXPECT_EQ(std::count(values.begin(), values.end(), constant),
                static_cast<std::ptrdiff_t>(values.size()))
          << name;
      continue;
    }
    const auto count = static_cast<double>(values.size());
    double sum = 0;
    double squares = 0;
    for (const float value : values) {
      sum += static_cast<double>(value);
      squares += std::pow(static_cast<double>(value), 2);
    }
    // Five deviations of the estimates.
    EXPECT_NEAR(sum / count, 0, 5 * 0.02 / std::sqrt(count)) << name;
    EXPECT_NEAR(std::sqrt(squares / count), 0.02, 5 * 0.02 / std::sqrt(2 * count)) << name;
  }
}

TEST_P(InitWeights, DependOnTheSeedAlone) {
  const States expected = states(config_);
  EngineConfig config = config_;
  config.threads = 3;
  EXPECT_TRUE(same_states(expected, states(config))) << "threads";
  config = config_;
  config.placement.resident_blocks = 0;
  config.placement.device_optimizer_blocks = 0;
  EXPECT_TRUE(same_states(expected, states(config))) << "placement";
  const TempFolder drive;
  config.nvme.paths = {drive.path().string()};
  config.placement.nvme_optimizer_blocks = 3;
  config.placement.nvme_param_blocks = 2;
  EXPECT_TRUE(same_states(expected, states(config))) << "drive";
  for (const int ranks : {2, 3, 4}) {
    EXPECT_TRUE(same_states(expected, states_on(ranks))) << ranks << " ranks";
  }
  config_.seed += 1;
  EXPECT_FALSE(same_states(expected, states(config_))) << "another seed";
}

INSTANTIATE_TEST_SUITE_P(, InitWeights,
                         ::testing::Values(TinyFamily::kLlamaTied, TinyFamily::kQwen2,
                                           TinyFamily::kQwen3, TinyFamily::kGpt2),
                         [](const auto& info) { return family_name(info.param); });

}  // namespace
}  // namespace orlop::test

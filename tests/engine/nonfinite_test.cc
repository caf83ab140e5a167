// Steps whose gradients are not finite: skipped as a whole, or, without clipping, block by block;
// counted, and an error when they do not end.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "orlop/engine.h"
#include "tests/formats/support.h"
#include "tests/support/engine_run.h"
#include "tests/support/tiny_model.h"

namespace orlop::test {
namespace {

// GPT-2 with a position whose embedding overflows every norm: only documents that reach it, of the
// full 16 tokens, are poisoned.
void write_poisoned_model(const std::filesystem::path& folder) {
  const TinyShape shape;
  write_tiny_model(folder, TinyFamily::kGpt2, shape,
                   [&](const std::string& name, std::vector<float>& values) {
                     if (name != "transformer.wpe.weight") return;
                     const auto row = values.begin() + 15 * shape.hidden;
                     std::fill(row, row + shape.hidden, 3e38f);
                   });
}

std::vector<MicroBatch> batches_with_documents_of(const EngineConfig& config, int32_t tokens,
                                                  uint64_t seed) {
  std::vector<MicroBatch> batches = random_batches(3, config.batch, 61, seed);
  for (MicroBatch& batch : batches) {
    batch.cu_seqlens = {0};
    for (int32_t end = tokens; end < 32; end += tokens) batch.cu_seqlens.push_back(end);
    batch.cu_seqlens.push_back(32);
  }
  return batches;
}

struct Case {
  const char* name;
  Precision precision;
  int device_optimizer_blocks;
};

std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

class NonFinite : public ::testing::TestWithParam<Case> {
 protected:
  NonFinite() {
    write_poisoned_model(folder_.path());
    config_ = tiny_engine_config(GetParam().precision);
    config_.placement.device_optimizer_blocks = GetParam().device_optimizer_blocks;
    config_.optimizer.learning_rate = 1e-4;
  }

  std::string model() const { return folder_.path().string(); }
  std::vector<MicroBatch> good(uint64_t seed) const {
    return batches_with_documents_of(config_, 8, seed);
  }
  std::vector<MicroBatch> bad(uint64_t seed) const {
    return batches_with_documents_of(config_, 16, seed);
  }

  TempFolder folder_;
  EngineConfig config_;
};

TEST_P(NonFinite, StepsAreSkippedAsAWholeAndTheRunGoesOn) {
  const auto undisturbed = Engine::open(model(), config_);
  for (uint64_t seed = 1; seed <= 6; ++seed) ASSERT_FALSE(undisturbed->step(good(seed)).skipped);

  const auto engine = Engine::open(model(), config_);
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    if (seed == 3 || seed == 5) {
      const States before = read_states(*engine);
      const StepResult skipped = engine->step(bad(seed));
      EXPECT_TRUE(skipped.skipped);
      EXPECT_EQ(engine->steps_done(), static_cast<int64_t>(seed) - 1);
      EXPECT_TRUE(same_states(before, read_states(*engine)));
    }
    EXPECT_FALSE(engine->step(good(seed)).skipped);
  }
  EXPECT_EQ(engine->steps_done(), 6);
  EXPECT_EQ(engine->stats().skipped_steps, 2);
  EXPECT_TRUE(same_states(read_states(*undisturbed), read_states(*engine)));
}

TEST_P(NonFinite, TooManyInARowEndTheRunAndNameTheTensor) {
  config_.max_skipped_steps = 3;
  const auto engine = Engine::open(model(), config_);
  for (uint64_t seed = 1; seed <= 2; ++seed) EXPECT_TRUE(engine->step(bad(seed)).skipped);
  EXPECT_FALSE(engine->step(good(3)).skipped);  // the count starts anew
  for (uint64_t seed = 4; seed <= 5; ++seed) EXPECT_TRUE(engine->step(bad(seed)).skipped);
  const std::string text = error_of(ErrorCode::kNonFinite, [&] { engine->step(bad(6)); });
  EXPECT_NE(text.find("the gradient of 'transformer."), std::string::npos) << text;
  EXPECT_NE(text.find("3 steps in a row"), std::string::npos) << text;
  error_of(ErrorCode::kInternal, [&] { engine->step(good(7)); });
}

TEST_P(NonFinite, WithoutClippingTheStepCountsAndNoNanIsWritten) {
  config_.optimizer.max_grad_norm = 0;
  config_.max_skipped_steps = 2;
  const auto engine = Engine::open(model(), config_);
  EXPECT_FALSE(engine->step(good(1)).skipped);
  const StepResult step = engine->step(bad(2));
  EXPECT_TRUE(step.skipped);
  EXPECT_NE(step.nonfinite.find("the gradient of 'transformer."), std::string::npos)
      << step.nonfinite;
  EXPECT_EQ(engine->steps_done(), 2);
  EXPECT_EQ(engine->stats().skipped_steps, 1);
  for (const auto& [name, values] : read_states(*engine)) {
    EXPECT_TRUE(std::all_of(values.begin(), values.end(), [](float v) { return std::isfinite(v); }))
        << name;
  }
  EXPECT_FALSE(engine->step(good(3)).skipped);
  EXPECT_TRUE(engine->step(bad(4)).skipped);
  error_of(ErrorCode::kNonFinite, [&] { engine->step(bad(5)); });
}

INSTANTIATE_TEST_SUITE_P(, NonFinite,
                         ::testing::Values(Case{"fp32", Precision::kF32, 0},
                                           Case{"bf16", Precision::kBF16, 0},
                                           Case{"bf16_on_the_device", Precision::kBF16, 5}),
                         [](const auto& info) { return info.param.name; });

// GPT-2 whose second layer attends to huge values that its output projection multiplies by zero:
// the projection's gradient overflows, all others are finite, and so is the loss.
void write_model_with_one_bad_block(const std::filesystem::path& folder) {
  write_tiny_model(folder, TinyFamily::kGpt2, {}, [](const std::string& name, auto& values) {
    if (name == "transformer.ln_f.weight") {
      for (float& value : values) value *= 30000;
    } else if (name == "transformer.h.1.attn.c_attn.bias") {
      std::fill(values.begin() + 2 * static_cast<std::ptrdiff_t>(values.size()) / 3, values.end(),
                1e37f);
    } else if (name == "transformer.h.1.attn.c_proj.weight") {
      std::fill(values.begin(), values.end(), 0.0f);
    }
  });
}

TEST(NonFiniteBlock, WithoutClippingStaysAloneAndWithItNothingMoves) {
  const TempFolder folder;
  write_model_with_one_bad_block(folder.path());
  for (const Precision precision : {Precision::kF32, Precision::kBF16}) {
    EngineConfig config = tiny_engine_config(precision);
    const auto clipping = Engine::open(folder.path().string(), config);
    const States start = read_states(*clipping);
    EXPECT_TRUE(clipping->step(batches_of_step(config, 61, 1)).skipped);
    EXPECT_TRUE(same_states(start, read_states(*clipping)));

    config.optimizer.max_grad_norm = 0;
    std::vector<States> ends;
    for (const int blocks : {0, 2, 5}) {
      config.placement.device_optimizer_blocks = blocks;
      const auto engine = Engine::open(folder.path().string(), config);
      for (int64_t step = 1; step <= 3; ++step) {
        const StepResult result = engine->step(batches_of_step(config, 61, step));
        EXPECT_TRUE(result.skipped);
        EXPECT_TRUE(std::isfinite(result.loss));
        EXPECT_NE(result.nonfinite.find("'transformer.h.1.attn.c_proj.weight'"), std::string::npos)
            << result.nonfinite;
      }
      ends.push_back(read_states(*engine));
    }
    for (const auto& [name, values] : ends.front()) {
      const bool stays = name.starts_with("transformer.h.1.");
      if (!name.ends_with(".exp_avg")) continue;
      EXPECT_EQ(values == start.at(name), stays) << name;
    }
    EXPECT_TRUE(same_states(ends[0], ends[1]));
    EXPECT_TRUE(same_states(ends[0], ends[2]));
  }
}

// A head whose large weights push scaled gradients beyond fp16, but not unscaled ones.
TEST(LossScale, HalvesUntilGradientsFitAndTrainingGoesOn) {
  const TempFolder folder;
  write_tiny_model(folder.path(), TinyFamily::kLlama, {},
                   [](const std::string& name, auto& values) {
                     if (name != "lm_head.weight") return;
                     for (float& value : values) value *= 2000;
                   });
  EngineConfig config = tiny_engine_config(Precision::kF16);
  const auto engine = Engine::open(folder.path().string(), config);
  double scale = 65536;
  int skipped = 0;
  for (int64_t step = 1; step <= 14; ++step) {
    const StepResult result = engine->step(batches_of_step(config, 61, step));
    EXPECT_LE(result.loss_scale, scale);
    EXPECT_TRUE(result.loss_scale == scale || result.loss_scale == scale / 2) << result.loss_scale;
    EXPECT_TRUE(std::isfinite(result.loss)) << "the loss itself is in range";
    scale = result.loss_scale;
    skipped += result.skipped ? 1 : 0;
    EXPECT_EQ(engine->stats().skipped_steps, skipped);
    EXPECT_EQ(engine->steps_done(), step - skipped);
  }
  EXPECT_GE(skipped, 2);
  EXPECT_LT(scale, 65536);
  EXPECT_GT(scale, 1);
  EXPECT_GE(engine->steps_done(), 3) << "training recovered";
}

TEST(LossScale, AtItsFloorTheRunEndsAndNamesTheTensor) {
  const TempFolder folder;
  write_poisoned_model(folder.path());
  EngineConfig config = tiny_engine_config(Precision::kF16);
  config.max_skipped_steps = 2;
  const auto engine = Engine::open(folder.path().string(), config);
  const States before = read_states(*engine);
  // One more for the hysteresis, 16 halvings from 2^16 to 1, and the first of the two failures.
  for (uint64_t seed = 1; seed <= 18; ++seed) {
    EXPECT_TRUE(engine->step(batches_with_documents_of(config, 16, seed)).skipped) << seed;
  }
  EXPECT_TRUE(same_states(before, read_states(*engine)));
  const std::string text = error_of(
      ErrorCode::kNonFinite, [&] { engine->step(batches_with_documents_of(config, 16, 19)); });
  EXPECT_NE(text.find("the gradient of 'transformer."), std::string::npos) << text;
  EXPECT_NE(text.find("floor of 1"), std::string::npos) << text;
}

}  // namespace
}  // namespace orlop::test

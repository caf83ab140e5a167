#include "optim/grad_scaler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <random>

#include "orlop/error.h"

namespace orlop {
namespace {

// DeepSpeed's rule as it is published, with its own counters.
struct DeepSpeedScaler {
  double scale, floor;
  int64_t window, delayed_shift;
  bool consecutive;
  int64_t hysteresis = delayed_shift;
  int64_t iteration = 0, last_overflow = -1;

  void update(bool overflow) {
    if (overflow) {
      if (delayed_shift == 1 || hysteresis == 1) {
        scale = std::max(scale / 2, floor);
      } else {
        --hysteresis;
      }
      last_overflow = iteration;
    } else {
      if (consecutive) hysteresis = delayed_shift;
      if ((iteration - last_overflow) % window == 0) {
        if (!consecutive) hysteresis = delayed_shift;
        scale *= 2;
      }
    }
    ++iteration;
  }
};

TEST(GradScalerTest, FollowsDeepSpeedOverRandomSteps) {
  std::mt19937 random(7);
  for (const int64_t hysteresis : {1, 2, 4}) {
    for (const bool consecutive : {false, true}) {
      GradScalerConfig config;
      config.initial_scale = 1024;
      config.window = 5;
      config.hysteresis = hysteresis;
      config.consecutive_hysteresis = consecutive;
      config.max_failures = std::numeric_limits<int64_t>::max();
      GradScaler scaler(config);
      DeepSpeedScaler reference{1024, 1, 5, hysteresis, consecutive};
      for (int step = 0; step < 1200; ++step) {
        // Phases with few and with many overflows, so that growth and floor are both reached.
        const bool overflow = random() % 100 < (step / 60 % 2 == 0 ? 8u : 80u);
        overflow ? scaler.step_nonfinite("x") : scaler.step_finite();
        reference.update(overflow);
        ASSERT_EQ(scaler.scale(), reference.scale) << "step " << step;
        ASSERT_EQ(scaler.state().hysteresis_left, reference.hysteresis) << "step " << step;
      }
    }
  }
}

TEST(GradScalerTest, StartsAt65536AndDoublesAfterAThousandSteps) {
  GradScaler scaler{GradScalerConfig{}};
  for (int step = 0; step < 999; ++step) scaler.step_finite();
  EXPECT_EQ(scaler.scale(), 65536.0f);
  scaler.step_finite();
  EXPECT_EQ(scaler.scale(), 131072.0f);
}

TEST(GradScalerTest, EndsTheRunAtTheFloorAndNamesTheParameter) {
  GradScalerConfig config;
  config.max_failures = 3;
  GradScaler scaler(config);
  // One step of hysteresis, 16 halvings from 2^16 to 1, then three failures.
  for (int step = 0; step < 1 + 16 + 2; ++step) scaler.step_nonfinite("NaN in layer.3");
  EXPECT_EQ(scaler.scale(), 1.0f);
  try {
    scaler.step_nonfinite("NaN in the gradient of layer.3");
    FAIL() << "the run went on";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNonFinite);
    EXPECT_THAT(error.what(), testing::HasSubstr("NaN in the gradient of layer.3"));
    EXPECT_THAT(error.what(), testing::HasSubstr("floor"));
  }
  EXPECT_EQ(scaler.state().skipped_steps, 20);
}

TEST(GradScalerTest, AFiniteStepEndsARowOfFailures) {
  GradScalerConfig config;
  config.initial_scale = 1;
  config.hysteresis = 1;
  config.max_failures = 2;
  GradScaler scaler(config);
  for (int round = 0; round < 10; ++round) {
    scaler.step_nonfinite("x");
    scaler.step_finite();
  }
  EXPECT_EQ(scaler.state().skipped_steps, 10);
  scaler.step_nonfinite("x");
  EXPECT_THROW(scaler.step_nonfinite("x"), Error);
}

TEST(GradScalerTest, AFixedScaleNeverMovesAndSpeaksOfNoScale) {
  GradScaler scaler({.dynamic = false, .initial_scale = 1, .max_failures = 2});
  for (int step = 0; step < 5000; ++step) scaler.step_finite();
  EXPECT_EQ(scaler.scale(), 1.0f);
  scaler.step_nonfinite("NaN in head");
  EXPECT_EQ(scaler.scale(), 1.0f);
  try {
    scaler.step_nonfinite("NaN in head");
    FAIL() << "the run went on";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("NaN in head"));
    EXPECT_THAT(error.what(), testing::Not(testing::HasSubstr("scale")));
  }
}

TEST(GradScalerTest, StaysFiniteWhenGradientsAreAlwaysZero) {
  GradScaler scaler({.window = 1});
  for (int step = 0; step < 1000; ++step) scaler.step_finite();
  EXPECT_EQ(scaler.scale(), 0x1p60f);
}

TEST(GradScalerTest, GoesOnFromASavedState) {
  GradScalerConfig config;
  config.window = 4;
  GradScaler straight(config), first(config);
  const auto run = [](GradScaler& scaler, int from, int to) {
    for (int step = from; step < to; ++step) {
      step % 7 == 3 ? scaler.step_nonfinite("x") : scaler.step_finite();
    }
  };
  run(straight, 0, 40);
  run(first, 0, 18);
  GradScaler second(config);
  second.restore(first.state());
  run(second, 18, 40);
  EXPECT_EQ(second.scale(), straight.scale());
  EXPECT_EQ(second.state().hysteresis_left, straight.state().hysteresis_left);
  EXPECT_EQ(second.state().finite_steps, straight.state().finite_steps);
  EXPECT_EQ(second.state().skipped_steps, straight.state().skipped_steps);
}

TEST(GradScalerTest, RefusesImpossibleNumbers) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  EXPECT_THROW(GradScaler({.initial_scale = kInf}), Error);
  EXPECT_THROW(GradScaler({.initial_scale = -1}), Error);
  EXPECT_THROW(GradScaler({.initial_scale = 1, .min_scale = 2}), Error);
  EXPECT_THROW(GradScaler({.window = 0}), Error);
  EXPECT_THROW(GradScaler({.hysteresis = 0}), Error);
  GradScaler scaler{GradScalerConfig{}};
  GradScalerState state = scaler.state();
  state.scale = 0;
  EXPECT_THROW(scaler.restore(state), Error);
}

}  // namespace
}  // namespace orlop

#include "optim/grad_scaler.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace orlop {
namespace {

constexpr double kFactor = 2.0;
// Far above any scale at which fp16 gradients survive; keeps the scale finite when they are all
// zero.
constexpr double kMaxScale = 0x1p60;

bool is_scale(double value) {
  return std::isfinite(value) && value > 0 && value <= kMaxScale &&
         static_cast<double>(static_cast<float>(value)) == value;
}

}  // namespace

GradScaler::GradScaler(const GradScalerConfig& config) : config_(config) {
  check(is_scale(config.initial_scale), ErrorCode::kUsage,
        "loss scale {} is not a positive fp32 number of at most 2^60", config.initial_scale);
  check(is_scale(config.min_scale) && (!config.dynamic || config.min_scale <= config.initial_scale),
        ErrorCode::kUsage, "min_loss_scale {} must be positive and at most the initial scale {}",
        config.min_scale, config.initial_scale);
  check(config.window > 0, ErrorCode::kUsage, "loss_scale_window is {}; it must be at least 1",
        config.window);
  check(config.hysteresis > 0, ErrorCode::kUsage, "hysteresis is {}; it must be at least 1",
        config.hysteresis);
  check(config.max_failures > 0, ErrorCode::kUsage,
        "the number of non-finite steps that end the run is {}; it must be at least 1",
        config.max_failures);
  state_.scale = config.initial_scale;
  state_.hysteresis_left = config.hysteresis;
}

void GradScaler::step_finite() {
  state_.failures = 0;
  ++state_.finite_steps;
  if (!config_.dynamic) return;
  const bool window_passed = state_.finite_steps % config_.window == 0;
  if (window_passed || config_.consecutive_hysteresis) state_.hysteresis_left = config_.hysteresis;
  if (window_passed) state_.scale = std::min(state_.scale * kFactor, kMaxScale);
}

void GradScaler::step_nonfinite(std::string_view first_bad) {
  state_.finite_steps = 0;
  ++state_.skipped_steps;
  if (config_.dynamic && state_.hysteresis_left > 1) {
    --state_.hysteresis_left;
    return;
  }
  if (config_.dynamic && state_.scale > config_.min_scale) {
    state_.scale = std::max(state_.scale / kFactor, config_.min_scale);
    return;
  }
  ++state_.failures;
  if (state_.failures < config_.max_failures) return;
  if (config_.dynamic) {
    fail(ErrorCode::kNonFinite,
         "{}; {} steps in a row could not be used although the loss scale is at its floor of {}",
         first_bad, state_.failures, config_.min_scale);
  }
  fail(ErrorCode::kNonFinite, "{}; {} steps in a row could not be used", first_bad,
       state_.failures);
}

void GradScaler::restore(const GradScalerState& state) {
  check(is_scale(state.scale), ErrorCode::kInvalidData,
        "the saved loss scale {} is not a positive fp32 number of at most 2^60", state.scale);
  check(
      state.hysteresis_left >= 1 && state.finite_steps >= 0 && state.failures >= 0 &&
          state.skipped_steps >= 0,
      ErrorCode::kInvalidData,
      "the saved state of the loss scale is damaged: hysteresis {}, {} finite steps, {} failures, "
      "{} skipped",
      state.hysteresis_left, state.finite_steps, state.failures, state.skipped_steps);
  state_ = state;
}

}  // namespace orlop

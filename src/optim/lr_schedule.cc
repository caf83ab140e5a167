#include "optim/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/check.h"

namespace orlop {
namespace {

// numerator / max(1, denominator)
double ratio(int64_t numerator, int64_t denominator) {
  return static_cast<double>(numerator) / static_cast<double>(std::max<int64_t>(1, denominator));
}

double half_cosine(double progress) {
  return 0.5 * (1.0 + std::cos(std::numbers::pi * 0.5 * 2.0 * progress));
}

double above_floor(double factor, double min_ratio) {
  return std::max(0.0, factor * (1.0 - min_ratio) + min_ratio);
}

}  // namespace

LrSchedule::LrSchedule(const LrScheduleConfig& config) : config_(config) {
  check(std::isfinite(config.peak_lr) && config.peak_lr >= 0, ErrorCode::kUsage,
        "learning_rate is {}; it must be a finite number of at least 0", config.peak_lr);
  check(config.min_ratio >= 0 && config.min_ratio <= 1, ErrorCode::kUsage,
        "the learning rate's floor is {} of the peak; it must lie in [0, 1]", config.min_ratio);
  check(config.total_steps >= 0 && config.warmup_steps >= 0 && config.decay_steps >= 0,
        ErrorCode::kUsage, "steps must not be negative: {} in all, {} warm-up, {} decay",
        config.total_steps, config.warmup_steps, config.decay_steps);
  check(config.kind == LrScheduleKind::kConstant || config.warmup_steps <= config.total_steps,
        ErrorCode::kUsage, "warmup_steps {} exceed the {} steps of the run", config.warmup_steps,
        config.total_steps);
  check(config.kind != LrScheduleKind::kWsd ||
            config.decay_steps <= config.total_steps - config.warmup_steps,
        ErrorCode::kUsage, "warm-up {} and decay {} exceed the {} steps of the run",
        config.warmup_steps, config.decay_steps, config.total_steps);
}

double LrSchedule::operator()(int64_t step) const { return config_.peak_lr * factor(step); }

double LrSchedule::factor(int64_t step) const {
  const int64_t warmup = config_.warmup_steps;
  const int64_t total = config_.total_steps;
  if (config_.kind == LrScheduleKind::kWsd) return wsd_factor(step);
  if (step < warmup) return ratio(step, warmup);
  switch (config_.kind) {
    case LrScheduleKind::kLinear:
      return above_floor(std::max(0.0, ratio(total - step, total - warmup)), config_.min_ratio);
    case LrScheduleKind::kCosine: {
      // Beyond the last step the cosine would rise again.
      const double progress = std::min(1.0, ratio(step - warmup, total - warmup));
      return above_floor(half_cosine(progress), config_.min_ratio);
    }
    case LrScheduleKind::kConstant:
    case LrScheduleKind::kWsd:
      break;
  }
  return 1.0;
}

double LrSchedule::wsd_factor(int64_t step) const {
  const int64_t warmup = config_.warmup_steps;
  const int64_t decay_begin = config_.total_steps - config_.decay_steps;
  if (step < warmup) return above_floor(ratio(step, warmup), config_.min_ratio);
  if (step < decay_begin) return 1.0;
  if (step >= config_.total_steps) return config_.min_ratio;
  const double progress = ratio(step - decay_begin, config_.decay_steps);
  switch (config_.wsd_decay) {
    case WsdDecay::kLinear:
      return above_floor(1.0 - progress, config_.min_ratio);
    case WsdDecay::kOneMinusSqrt:
      return above_floor(1.0 - std::sqrt(progress), config_.min_ratio);
    case WsdDecay::kCosine:
      break;
  }
  return above_floor(half_cosine(progress), config_.min_ratio);
}

}  // namespace orlop

#include "engine/update_settings.h"

namespace orlop {

LrScheduleConfig schedule_config(const EngineConfig& config) {
  LrScheduleConfig schedule;
  switch (config.schedule.kind) {
    case ScheduleKind::kConstant:
      schedule.kind = LrScheduleKind::kConstant;
      break;
    case ScheduleKind::kLinear:
      schedule.kind = LrScheduleKind::kLinear;
      break;
    case ScheduleKind::kCosine:
      schedule.kind = LrScheduleKind::kCosine;
      break;
    case ScheduleKind::kWsd:
      schedule.kind = LrScheduleKind::kWsd;
      break;
  }
  schedule.peak_lr = config.optimizer.learning_rate;
  schedule.total_steps = config.schedule.total_steps;
  schedule.warmup_steps = config.schedule.warmup_steps;
  schedule.decay_steps = static_cast<int64_t>(config.schedule.decay_ratio *
                                              static_cast<double>(config.schedule.total_steps));
  schedule.min_ratio = config.schedule.min_lr_ratio;
  return schedule;
}

GradScalerConfig scaler_config(const EngineConfig& config) {
  GradScalerConfig scaler;
  scaler.max_failures = config.max_skipped_steps;
  if (config.precision != Precision::kF16) {
    scaler.dynamic = false;
    scaler.initial_scale = 1;
  }
  return scaler;
}

}  // namespace orlop

#pragma once

#include <cstdint>

namespace orlop {

enum class LrScheduleKind : uint8_t {
  kConstant,  // warm-up, then the peak
  kLinear,    // warm-up, then a line to the floor at the last step
  kCosine,    // warm-up, then half a cosine to the floor at the last step
  kWsd,       // warm-up, stable at the peak, decay over the last decay_steps
};

enum class WsdDecay : uint8_t { kCosine, kLinear, kOneMinusSqrt };

struct LrScheduleConfig {
  LrScheduleKind kind = LrScheduleKind::kLinear;
  double peak_lr = 0;
  int64_t total_steps = 0;
  int64_t warmup_steps = 0;  // linear from 0 (WSD: from the floor)
  int64_t decay_steps = 0;   // WSD only
  WsdDecay wsd_decay = WsdDecay::kCosine;
  double min_ratio = 0;  // floor as a fraction of the peak; unused by kConstant
};

// Learning rate of one optimizer step; a pure function of the step, hence nothing to save or
// resume.
class LrSchedule {
 public:
  // Throws Error(kUsage) for numbers that make no schedule.
  explicit LrSchedule(const LrScheduleConfig& config);

  // `step` counts from 0. The same doubles as torch's LambdaLR with the lambdas of transformers.
  double operator()(int64_t step) const;

 private:
  double factor(int64_t step) const;
  double wsd_factor(int64_t step) const;

  LrScheduleConfig config_;
};

}  // namespace orlop

#pragma once

#include <cstdint>
#include <string_view>

namespace orlop {

struct GradScalerConfig {
  bool dynamic = true;  // false: `initial_scale` throughout (bf16 and fp32 compute: 1)
  double initial_scale = 65536.0;
  double min_scale = 1.0;
  int64_t window = 1000;  // finite steps in a row after which the scale doubles
  int64_t hysteresis =
      2;  // the scale halves only at this many non-finite steps, until a window passes
  bool consecutive_hysteresis = false;  // any finite step restores the hysteresis
  int64_t max_failures = 10;            // non-finite steps in a row that no smaller scale can cure
};

// What a checkpoint keeps of a scaler.
struct GradScalerState {
  double scale = 1.0;
  int64_t hysteresis_left = 1;
  int64_t finite_steps = 0;   // in a row
  int64_t failures = 0;       // in a row, at a scale that cannot be lowered
  int64_t skipped_steps = 0;  // of the whole run
};

// The factor on the loss that keeps fp16 gradients in range, and the end of runs whose gradients
// stay non-finite. The update rule is DeepSpeed's DynamicLossScaler.
class GradScaler {
 public:
  // Throws Error(kUsage) that names the field.
  explicit GradScaler(const GradScalerConfig& config);

  // The scale of the next step: exact in fp32, and a power of two while the configured ones are.
  float scale() const { return static_cast<float>(state_.scale); }

  // Ends a step whose gradients were all finite.
  void step_finite();
  // Ends a step that was skipped. `first_bad` says what was not finite and where; it goes into the
  // Error(kNonFinite) that is thrown once max_failures is reached.
  void step_nonfinite(std::string_view first_bad);

  const GradScalerState& state() const { return state_; }
  // Throws Error(kInvalidData) for numbers that no run leaves behind.
  void restore(const GradScalerState& state);

 private:
  GradScalerConfig config_;
  GradScalerState state_;
};

}  // namespace orlop

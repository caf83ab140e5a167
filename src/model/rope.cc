#include "model/rope.h"

#include <cmath>
#include <numbers>
#include <optional>

#include "base/check.h"

namespace orlop {
namespace {

// 1 / theta^(2i / dim), in fp32 as torch computes it.
std::vector<float> plain_frequencies(double theta, int64_t dim) {
  std::vector<float> frequencies;
  for (int64_t i = 0; i < dim; i += 2) {
    const float exponent = static_cast<float>(i) / static_cast<float>(dim);
    frequencies.push_back(1.0f / std::pow(static_cast<float>(theta), exponent));
  }
  return frequencies;
}

double required_number(const std::optional<double>& value, const char* field, const HfRope& hf,
                       const std::string& file) {
  check(value.has_value() && std::isfinite(*value) && *value > 0, ErrorCode::kInvalidData,
        "{}: rope type \"{}\" needs a positive number in rope_parameters.{} (or rope_scaling.{})",
        file, hf.type, field, field);
  return *value;
}

// Wavelengths beyond the original context are stretched by `factor`, short ones stay, those between
// are interpolated (Llama 3.1).
void scale_llama3(RopeConfig& rope, const HfRope& hf, const std::string& file) {
  const auto factor = static_cast<float>(required_number(hf.factor, "factor", hf, file));
  const double low = required_number(hf.low_freq_factor, "low_freq_factor", hf, file);
  const double high = required_number(hf.high_freq_factor, "high_freq_factor", hf, file);
  check(high > low, ErrorCode::kInvalidData,
        "{}: rope_parameters.high_freq_factor {} must exceed low_freq_factor {}", file, high, low);
  check(hf.original_max_position_embeddings.has_value(), ErrorCode::kInvalidData,
        "{}: rope type \"llama3\" needs rope_parameters.original_max_position_embeddings", file);
  const auto context = static_cast<double>(*hf.original_max_position_embeddings);
  const auto low_wavelength = static_cast<float>(context / low);
  const auto high_wavelength = static_cast<float>(context / high);
  for (float& frequency : rope.inv_frequencies) {
    const float wavelength = static_cast<float>(2 * std::numbers::pi) / frequency;
    if (wavelength < high_wavelength) continue;
    if (wavelength > low_wavelength) {
      frequency /= factor;
      continue;
    }
    const float smooth = (static_cast<float>(context) / wavelength - static_cast<float>(low)) /
                         static_cast<float>(high - low);
    frequency = (1.0f - smooth) * frequency / factor + smooth * frequency;
  }
}

}  // namespace

RopeConfig make_rope_config(const HfRope& hf, int64_t head_dim, const std::string& file) {
  check(head_dim % 2 == 0, ErrorCode::kInvalidData,
        "{}: head_dim {} is odd; rotary embeddings rotate pairs", file, head_dim);
  check(hf.partial_rotary_factor.value_or(1.0) == 1.0, ErrorCode::kInvalidData,
        "{}: partial_rotary_factor {} is not supported; only whole heads rotate", file,
        hf.partial_rotary_factor.value_or(1.0));
  RopeConfig rope;
  rope.enabled = true;
  rope.theta = hf.theta;
  rope.rotary_dim = head_dim;
  rope.inv_frequencies = plain_frequencies(hf.theta, head_dim);
  if (hf.type == "llama3") {
    scale_llama3(rope, hf, file);
  } else if (hf.type == "linear") {
    const auto factor = static_cast<float>(required_number(hf.factor, "factor", hf, file));
    for (float& frequency : rope.inv_frequencies) frequency /= factor;
  } else {
    check(hf.type == "default", ErrorCode::kInvalidData,
          "{}: rope type \"{}\" (rope_parameters.rope_type or rope_scaling.type) is not supported; "
          "supported are default, linear and llama3",
          file, hf.type);
  }
  return rope;
}

std::vector<float> rope_table(const RopeConfig& rope, int64_t max_position) {
  std::vector<float> table;
  table.reserve(static_cast<size_t>(max_position) * rope.inv_frequencies.size() * 2);
  for (int64_t position = 0; position < max_position; ++position) {
    for (const float frequency : rope.inv_frequencies) {
      const double angle =
          static_cast<float>(position) * frequency;  // rounded to fp32, as in training
      table.push_back(static_cast<float>(std::cos(angle)));
      table.push_back(static_cast<float>(std::sin(angle)));
    }
  }
  return table;
}

}  // namespace orlop

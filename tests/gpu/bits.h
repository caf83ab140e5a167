#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "device_data.h"

// What the tests of the update and of the norm share: both compare bits with cpu_adam.
namespace orlop::test {

using Bytes = std::vector<std::byte>;

// Tensors of more than 2^31 elements repeat with this period, so that any window's contents are
// known.
inline constexpr int64_t kPeriod = int64_t{1} << 20;

class GpuBits : public testing::Test {
 protected:
  void SetUp() override { SKIP_WITHOUT_GPU(); }

  Bytes get_bytes(const void* device, size_t bytes) { return data_.get<std::byte>(device, bytes); }

  std::mt19937_64 random_{20240607};
  DeviceData data_;
};

// Ordinary values, zeros of both signs, subnormals and, with `special`, infinities and NaN.
inline std::vector<float> values(std::mt19937_64& random, int64_t numel, float deviation,
                                 bool special) {
  std::normal_distribution<float> normal(0.0f, deviation);
  std::vector<float> out(static_cast<size_t>(numel));
  for (float& value : out) {
    value = normal(random);
    const uint64_t dice = random() % 64;
    if (dice == 0) value = 0.0f;
    if (dice == 1) value = -0.0f;
    if (dice == 2) value *= 0x1p-130f;
    if (special && dice == 3) value = std::numeric_limits<float>::quiet_NaN();
    if (special && dice == 4) value = -std::numeric_limits<float>::infinity();
  }
  return out;
}

inline Bytes encode(const std::vector<float>& in, DType dtype) {
  Bytes out(in.size() * dtype_bytes(dtype));
  for (size_t i = 0; i < in.size(); ++i) {
    if (dtype == DType::kF32) {
      std::memcpy(out.data() + 4 * i, &in[i], 4);
    } else {
      const uint16_t bits = dtype == DType::kBF16 ? float_to_bf16(in[i]) : float_to_fp16(in[i]);
      std::memcpy(out.data() + 2 * i, &bits, 2);
    }
  }
  return out;
}

}  // namespace orlop::test

#include "test_device.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <stdexcept>

#include "base/bytes.h"
#include "base/half.h"

namespace orlop::test {
namespace {

uint16_t encode16(double value, DType dtype) {
  const auto single = static_cast<float>(value);
  return dtype == DType::kBF16 ? float_to_bf16(single) : float_to_fp16(single);
}

double decode16(uint16_t bits, DType dtype) {
  return static_cast<double>(dtype == DType::kBF16 ? bf16_to_float(bits) : fp16_to_float(bits));
}

}  // namespace

Values rounded(const Values& values, DType dtype) {
  Values result(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    result[i] = dtype == DType::kF32 ? static_cast<double>(static_cast<float>(values[i]))
                                     : decode16(encode16(values[i], dtype), dtype);
  }
  return result;
}

Values random_values(std::mt19937_64& random, int64_t numel, DType dtype, double deviation) {
  std::normal_distribution<double> normal(0.0, deviation);
  Values values(static_cast<size_t>(numel));
  for (double& value : values) value = normal(random);
  return rounded(values, dtype);
}

TestDevice::TestDevice(std::unique_ptr<Backend> backend, size_t arena_bytes)
    : backend_(std::move(backend)),
      arena_(static_cast<std::byte*>(backend_->allocate_arena(arena_bytes))),
      arena_bytes_(arena_bytes) {}

void* TestDevice::take(size_t bytes) {
  const size_t begin = used_;
  used_ = align_up(begin + bytes, kDeviceAlignment);
  if (used_ > arena_bytes_) throw std::length_error("the test's arena is too small");
  return arena_ + begin;
}

void* TestDevice::put_bytes(const void* host, size_t bytes) {
  void* device = take(bytes);
  queue().upload(device, host, bytes);
  queue().synchronize();
  return device;
}

void TestDevice::get_bytes(void* host, const void* device, size_t bytes) {
  queue().offload(host, device, bytes);
  queue().synchronize();
}

void* TestDevice::put(const Values& values, DType dtype) {
  if (dtype == DType::kF32) {
    return put_raw(std::vector<float>(values.begin(), values.end()));
  }
  std::vector<uint16_t> encoded(values.size());
  for (size_t i = 0; i < values.size(); ++i) encoded[i] = encode16(values[i], dtype);
  return put_raw(encoded);
}

void* TestDevice::poisoned(int64_t numel, DType dtype) {
  return poisoned_bytes(static_cast<size_t>(numel) * dtype_bytes(dtype));
}

void* TestDevice::poisoned_bytes(size_t bytes) {
  return put_raw(std::vector<uint8_t>(bytes, uint8_t{0xff}));
}

Values TestDevice::get(const void* device, int64_t numel, DType dtype) {
  Values values(static_cast<size_t>(numel));
  if (dtype == DType::kF32) {
    const auto raw = get_raw<float>(device, numel);
    for (size_t i = 0; i < raw.size(); ++i) values[i] = static_cast<double>(raw[i]);
    return values;
  }
  const auto raw = get_raw<uint16_t>(device, numel);
  for (size_t i = 0; i < raw.size(); ++i) values[i] = decode16(raw[i], dtype);
  return values;
}

void expect_close(const Values& actual, const Values& expected, double tolerance,
                  const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  double error = 0, norm = 0, worst = -1;
  size_t worst_index = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_TRUE(std::isfinite(actual[i]))
        << what << "[" << i << "] is " << actual[i] << ", expected " << expected[i];
    const double difference = std::abs(actual[i] - expected[i]);
    error += difference * difference;
    norm += expected[i] * expected[i];
    if (difference > worst) {
      worst = difference;
      worst_index = i;
    }
  }
  if (actual.empty()) return;
  EXPECT_LE(std::sqrt(error), tolerance * std::sqrt(norm))
      << what << ": relative error " << std::sqrt(error / norm) << ", worst at [" << worst_index
      << "]: " << actual[worst_index] << ", expected " << expected[worst_index];
}

}  // namespace orlop::test

#include "cpu_adam/grad_sum.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "adam_test_support.h"
#include "base/bytes.h"
#include "base/half.h"
#include "orlop/error.h"

namespace orlop::test {
namespace {

// A gradient in its own format.
struct Gradient {
  DType dtype;
  std::vector<std::byte> bytes;

  Gradient(DType type, size_t numel) : dtype(type), bytes(numel * dtype_bytes(type)) {}

  float get(size_t i) const {
    if (dtype == DType::kF32) {
      float value = 0;
      std::memcpy(&value, bytes.data() + 4 * i, 4);
      return value;
    }
    uint16_t half = 0;
    std::memcpy(&half, bytes.data() + 2 * i, 2);
    return dtype == DType::kBF16 ? bf16_to_float(half) : fp16_to_float(half);
  }

  void set(size_t i, float value) {
    if (dtype == DType::kF32) {
      std::memcpy(bytes.data() + 4 * i, &value, 4);
      return;
    }
    const uint16_t half = dtype == DType::kBF16 ? float_to_bf16(value) : float_to_fp16(value);
    std::memcpy(bytes.data() + 2 * i, &half, 2);
  }
};

float drawn(int stream, size_t i) {
  return test_value(static_cast<uint64_t>(stream), static_cast<int64_t>(i), 1.0f) *
         std::exp2(static_cast<float>(i * 5 % 17) - 8.0f);
}

class GradSumOfEveryDtype : public ::testing::TestWithParam<DType> {};

// Three micro-batches of every length up to several vectors, and of more than a chunk: started,
// added, and added with rounding, beside plain loops.
TEST_P(GradSumOfEveryDtype, SumsAndRoundsOnEveryIsaAndThreadCount) {
  std::vector<size_t> sizes = {4095, 4096, 4097, 20'001};
  for (size_t size = 0; size <= 70; ++size) sizes.push_back(size);
  for (const size_t numel : sizes) {
    Gradient expected(GetParam(), numel);
    std::vector<float> expected_sum(numel, 0.0f);
    for (int part = 0; part < 3; ++part) {
      for (size_t i = 0; i < numel; ++i) {
        expected.set(i, drawn(part, i));
        expected_sum[i] = part == 0 ? expected.get(i) : expected_sum[i] + expected.get(i);
      }
    }
    for (size_t i = 0; i < numel; ++i) expected.set(i, expected_sum[i]);
    std::vector<double> scratch(numel / kNormChunk + 1);
    const SquareSum squares = grad_square_sum(expected.bytes.data(), expected.dtype,
                                              static_cast<int64_t>(numel), scratch.data(), 1);
    for (const Isa isa : available_isas()) {
      const ScopedEnv limit("ORLOP_MAX_ISA", isa_name(isa));
      for (const int threads : {1, 3}) {
        Gradient grad(GetParam(), numel);
        std::vector<float> sum(numel, NAN);
        GradSum work{grad.bytes.data(), grad.dtype, sum.data(), static_cast<int64_t>(numel)};
        SquareSum found;
        for (int part = 0; part < 3; ++part) {
          for (size_t i = 0; i < numel; ++i) grad.set(i, drawn(part, i));
          work.start = part == 0 ? SumStart::kStart : SumStart::kAdd;
          work.round = part == 2;
          found = sum_gradient(work, scratch.data(), threads);
        }
        ASSERT_EQ(sum, expected_sum) << numel << " elements, " << isa_name(isa);
        ASSERT_EQ(grad.bytes, expected.bytes) << numel << " elements, " << isa_name(isa);
        ASSERT_EQ(found.sum, squares.sum);
        ASSERT_EQ(found.first_nonfinite, -1);
      }
    }
  }
}

TEST_P(GradSumOfEveryDtype, KeepsWhatIsNotFinite) {
  constexpr size_t kNumel = 5000;
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const Isa isa : available_isas()) {
    const ScopedEnv limit("ORLOP_MAX_ISA", isa_name(isa));
    Gradient grad(GetParam(), kNumel);
    std::vector<float> sum(kNumel, 1.0f);
    sum[4500] = kInf;
    sum[4700] = NAN;
    sum[4900] = -kInf;
    GradSum work{grad.bytes.data(), grad.dtype, sum.data(), kNumel, SumStart::kKeep, true};
    std::vector<double> scratch(2);
    EXPECT_EQ(sum_gradient(work, scratch.data(), 2).first_nonfinite, 4500);
    EXPECT_EQ(grad.get(4500), kInf);
    EXPECT_TRUE(std::isnan(grad.get(4700)));
    EXPECT_EQ(grad.get(4900), -kInf);
    EXPECT_EQ(grad.get(0), 1.0f);
  }
}

TEST_P(GradSumOfEveryDtype, RefusesWhatIsMissing) {
  float sum = 0;
  GradSum work{nullptr, GetParam(), &sum, 1};
  EXPECT_THROW(sum_gradient(work, nullptr, 1), Error);
  work.grad = &sum;
  work.round = true;
  EXPECT_THROW(sum_gradient(work, nullptr, 1), Error);
}

INSTANTIATE_TEST_SUITE_P(Dtypes, GradSumOfEveryDtype,
                         ::testing::Values(DType::kF32, DType::kBF16, DType::kF16),
                         [](const auto& info) { return std::string(dtype_name(info.param)); });

}  // namespace
}  // namespace orlop::test

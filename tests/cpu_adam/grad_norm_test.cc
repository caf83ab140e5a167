#include "cpu_adam/grad_norm.h"

#include <xmmintrin.h>

#include <array>
#include <bit>
#include <cmath>

#include "adam_test_support.h"
#include "base/half.h"
#include "orlop/error.h"

namespace orlop::test {
namespace {

// A gradient in its own format, with the same numbers decoded.
struct Gradient {
  DType dtype;
  std::vector<float> values;
  std::vector<uint16_t> halves;

  const void* data() const {
    return dtype == DType::kF32 ? static_cast<const void*>(values.data()) : halves.data();
  }
  int64_t numel() const { return static_cast<int64_t>(values.size()); }
};

Gradient make_gradient(DType dtype, std::vector<float> values) {
  Gradient gradient{dtype, std::move(values), {}};
  if (dtype == DType::kF32) return gradient;
  for (float& value : gradient.values) {
    const uint16_t half = dtype == DType::kBF16 ? float_to_bf16(value) : float_to_fp16(value);
    gradient.halves.push_back(half);
    value = dtype == DType::kBF16 ? bf16_to_float(half) : fp16_to_float(half);
  }
  return gradient;
}

Gradient random_gradient(DType dtype, int64_t numel) {
  std::vector<float> values(static_cast<size_t>(numel));
  for (int64_t i = 0; i < numel; ++i) {
    // Magnitudes over many orders, so that another order of the sum gives other bits.
    values[static_cast<size_t>(i)] =
        test_value(1, i, 1.0f) * std::exp2(static_cast<float>(i * 7 % 23) - 11.0f);
  }
  return make_gradient(dtype, std::move(values));
}

// The documented order, word by word.
double documented_sum(const std::vector<float>& values) {
  std::vector<double> sums;
  for (size_t begin = 0; begin < values.size(); begin += 4096) {
    std::array<double, 16> lanes{};
    for (size_t i = begin; i < std::min(begin + 4096, values.size()); ++i) {
      lanes[(i - begin) % 16] += static_cast<double>(values[i]) * static_cast<double>(values[i]);
    }
    for (const size_t half : {8u, 4u, 2u, 1u}) {
      for (size_t j = 0; j < half; ++j) lanes[j] += lanes[j + half];
    }
    sums.push_back(lanes[0]);
  }
  while (sums.size() > 1) {
    std::vector<double> next;
    for (size_t i = 0; i + 1 < sums.size(); i += 2) next.push_back(sums[i] + sums[i + 1]);
    if (sums.size() % 2 == 1) next.push_back(sums.back());
    sums = next;
  }
  return sums.empty() ? 0.0 : sums[0];
}

SquareSum run(const Gradient& gradient, int threads) {
  std::vector<double> scratch(
      static_cast<size_t>((gradient.numel() + kNormChunk - 1) / kNormChunk));
  return grad_square_sum(gradient.data(), gradient.dtype, gradient.numel(), scratch.data(),
                         threads);
}

class EveryGradDtype : public ::testing::TestWithParam<DType> {};

TEST_P(EveryGradDtype, SumsInTheDocumentedOrderOnEveryIsaAndThreadCount) {
  for (const int64_t numel :
       {0, 1, 15, 16, 17, 4095, 4096, 4097, 8191, 12288, 20483, 7 * 4096 + 5, 100003}) {
    const Gradient gradient = random_gradient(GetParam(), numel);
    const double expected = documented_sum(gradient.values);
    for (const Isa isa : available_isas()) {
      const ScopedEnv limit("ORLOP_MAX_ISA", isa_name(isa));
      for (int threads = 1; threads <= 4; ++threads) {
        const SquareSum result = run(gradient, threads);
        ASSERT_EQ(std::bit_cast<uint64_t>(result.sum), std::bit_cast<uint64_t>(expected))
            << numel << " elements, " << isa_name(isa) << ", " << threads
            << " threads: " << result.sum << " and " << expected;
        ASSERT_EQ(result.first_nonfinite, -1);
      }
    }
  }
}

TEST_P(EveryGradDtype, NamesTheFirstNonFiniteElement) {
  constexpr int64_t kNumel = 20011;
  for (const Isa isa : available_isas()) {
    const ScopedEnv limit("ORLOP_MAX_ISA", isa_name(isa));
    for (const int64_t bad : {0, 15, 4095, 4096, 9999, 20010}) {
      for (const float value : {NAN, INFINITY, -INFINITY}) {
        std::vector<float> values(kNumel, 0.5f);
        values[static_cast<size_t>(bad)] = value;
        values[kNumel - 1] = INFINITY;
        const SquareSum result = run(make_gradient(GetParam(), values), 3);
        EXPECT_EQ(result.first_nonfinite, bad) << isa_name(isa);
        EXPECT_FALSE(std::isfinite(result.sum));
      }
    }
  }
}

TEST_P(EveryGradDtype, LargestAndSmallestNumbersAreFinite) {
  const float largest = GetParam() == DType::kF16    ? 65504.0f
                        : GetParam() == DType::kBF16 ? bf16_to_float(0x7f7f)
                                                     : 3.40282347e38f;
  const SquareSum large = run(make_gradient(GetParam(), std::vector<float>(10000, largest)), 2);
  EXPECT_EQ(large.first_nonfinite, -1);
  EXPECT_NEAR(large.sum / (1e4 * static_cast<double>(largest) * largest), 1.0, 1e-12);

  const float smallest = GetParam() == DType::kF16    ? 0x1p-24f
                         : GetParam() == DType::kBF16 ? bf16_to_float(1)
                                                      : 0x1p-149f;
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040);  // FTZ and DAZ
  const SquareSum small = run(make_gradient(GetParam(), std::vector<float>(64, smallest)), 2);
  _mm_setcsr(before);
  EXPECT_EQ(small.sum, 64 * static_cast<double>(smallest) * smallest);
}

INSTANTIATE_TEST_SUITE_P(GradNorm, EveryGradDtype,
                         ::testing::Values(DType::kF32, DType::kBF16, DType::kF16),
                         [](const auto& info) { return std::string(dtype_name(info.param)); });

TEST(GradNorm, RefusesWhatItCannotRead) {
  double scratch = 0;
  const float value = 1;
  EXPECT_THROW(grad_square_sum(&value, DType::kF64, 1, &scratch, 1), Error);
  EXPECT_THROW(grad_square_sum(nullptr, DType::kF32, 1, &scratch, 1), Error);
  EXPECT_THROW(grad_square_sum(&value, DType::kF32, 1, nullptr, 1), Error);
  EXPECT_THROW(grad_square_sum(&value, DType::kF32, -1, &scratch, 1), Error);
  EXPECT_THROW(grad_square_sum(&value, DType::kF32, 1, &scratch, 0), Error);
}

}  // namespace
}  // namespace orlop::test

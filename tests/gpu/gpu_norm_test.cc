// Rounded gradients, their square sums and the step's scalars equal the CPU's bit for bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "bits.h"
#include "cpu_adam/grad_norm.h"

namespace orlop::test {
namespace {

auto* const environment =
    static_cast<GpuEnvironment*>(testing::AddGlobalTestEnvironment(new GpuEnvironment(14 * kGiB)));

struct Rounded {
  Bytes values;
  double square_sum;
  int64_t first_nonfinite;
};

class GpuNorm : public GpuBits, public testing::WithParamInterface<DType> {
 protected:
  Rounded round(const std::vector<float>& gradient) {
    const auto numel = static_cast<int64_t>(gradient.size());
    const DType dtype = GetParam();
    RoundGradArgs args;
    args.grad = data_.put(gradient);
    args.rounded = data_.take(gradient.size() * dtype_bytes(dtype));
    args.square_sum = reinterpret_cast<double*>(data_.take(sizeof(double)));
    args.first_nonfinite = reinterpret_cast<int64_t*>(data_.take(sizeof(int64_t)));
    args.scratch = data_.take(data_.ops().grad_norm_scratch_bytes(numel));
    args.numel = numel;
    args.out_dtype = dtype;
    data_.ops().round_grad(data_.queue(), args);
    return {get_bytes(args.rounded, gradient.size() * dtype_bytes(dtype)),
            data_.get_one(args.square_sum), data_.get_one(args.first_nonfinite)};
  }
};

TEST_P(GpuNorm, EqualsTheCpuBitForBit) {
  const DType dtype = GetParam();
  for (const int64_t numel :
       {0, 1, 15, 16, 17, 4095, 4096, 4097, 65535, 65536, 65537, 200003, 1048576, 5000011}) {
    SCOPED_TRACE(numel);
    data_.reset();
    const std::vector<float> gradient = values(random_, numel, 0.02f, false);
    const Rounded result = round(gradient);
    const Bytes expected = encode(gradient, dtype);
    EXPECT_EQ(result.values, expected);
    std::vector<double> scratch(static_cast<size_t>(ceil_div(numel, kNormChunk)) + 1);
    const SquareSum cpu = grad_square_sum(expected.data(), dtype, numel, scratch.data(), 2);
    EXPECT_EQ(std::bit_cast<uint64_t>(result.square_sum), std::bit_cast<uint64_t>(cpu.sum));
    EXPECT_EQ(result.first_nonfinite, -1);
  }
}

TEST_P(GpuNorm, FindsTheFirstNonFiniteElement) {
  std::vector<float> gradient = values(random_, 300007, 0.02f, false);
  for (const int64_t at : {299999, 140000, 65536, 4096, 17, 0}) {
    data_.reset();
    gradient[static_cast<size_t>(at)] = at % 2 == 0 ? std::numeric_limits<float>::infinity()
                                                    : std::numeric_limits<float>::quiet_NaN();
    const Rounded result = round(gradient);
    EXPECT_EQ(result.first_nonfinite, at);
    EXPECT_FALSE(std::isfinite(result.square_sum));
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, GpuNorm, testing::Values(DType::kF32, DType::kBF16, DType::kF16),
                         [](const auto& info) { return std::string(dtype_name(info.param)); });

TEST_F(GpuBits, NormOfMoreThan2To31ElementsEqualsTheCpu) {
  constexpr int64_t kNumel = (int64_t{1} << 31) + 100003;
  const std::vector<float> period = values(random_, kPeriod, 0.02f, false);
  std::byte* grad = data_.repeated(period, static_cast<size_t>(kNumel) * 4);
  RoundGradArgs args;
  args.grad = reinterpret_cast<const float*>(grad);
  args.rounded = data_.take(static_cast<size_t>(kNumel) * 2);
  args.square_sum = reinterpret_cast<double*>(data_.take(sizeof(double)));
  args.first_nonfinite = reinterpret_cast<int64_t*>(data_.take(sizeof(int64_t)));
  args.scratch = data_.take(data_.ops().grad_norm_scratch_bytes(kNumel));
  args.numel = kNumel;
  args.out_dtype = DType::kBF16;
  data_.ops().round_grad(data_.queue(), args);

  const Bytes rounded = encode(period, DType::kBF16);
  std::vector<double> sums(static_cast<size_t>(ceil_div(kNumel, kNormChunk)));
  double scratch = 0;
  for (size_t chunk = 0; chunk < sums.size(); ++chunk) {
    const int64_t begin = static_cast<int64_t>(chunk) * kNormChunk;
    sums[chunk] = grad_square_sum(rounded.data() + begin % kPeriod * 2, DType::kBF16,
                                  std::min(kNormChunk, kNumel - begin), &scratch, 1)
                      .sum;
  }
  const double expected = fold_chunk_sums(sums.data(), static_cast<int64_t>(sums.size()));
  EXPECT_EQ(std::bit_cast<uint64_t>(data_.get_one(args.square_sum)),
            std::bit_cast<uint64_t>(expected));
  EXPECT_EQ(data_.get_one(args.first_nonfinite), -1);
  const Bytes tail = get_bytes(static_cast<std::byte*>(args.rounded) + (kNumel - 3) * 2, 6);
  for (int64_t i = 0; i < 3; ++i) {
    const auto at = static_cast<size_t>((kNumel - 3 + i) % kPeriod * 2);
    EXPECT_EQ(std::memcmp(tail.data() + 2 * i, rounded.data() + at, 2), 0) << i;
  }

  // An infinity behind the 2^31st element is found.
  const int64_t bad = kNumel - 11;
  const float infinity = std::numeric_limits<float>::infinity();
  data_.queue().upload(grad + bad * 4, &infinity, 4);
  data_.ops().round_grad(data_.queue(), args);
  EXPECT_EQ(data_.get_one(args.first_nonfinite), bad);
}

TEST_F(GpuBits, FinishNormEqualsTheHostArithmetic) {
  std::uniform_real_distribution<double> uniform(0.0, 1e3);
  for (const float max_norm : {0.0f, 1.0f, 1e6f}) {
    for (const float loss_scale : {1.0f, 65536.0f}) {
      std::vector<double> sums(257);
      double sum = 0;
      for (double& value : sums) sum += value = uniform(random_);
      const std::vector<int64_t> finite(sums.size(), -1);
      FinishNormArgs args;
      args.square_sums = data_.put(sums);
      args.first_nonfinite = data_.put(finite);
      args.params = static_cast<int64_t>(sums.size());
      args.max_norm = max_norm;
      args.loss_scale = loss_scale;
      args.out = reinterpret_cast<StepScalars*>(data_.take(sizeof(StepScalars)));
      data_.ops().finish_norm(data_.queue(), args);
      const StepScalars result = data_.get_one(args.out);
      const double norm = std::sqrt(sum) / static_cast<double>(loss_scale);
      const double clip =
          max_norm > 0 ? std::min(1.0, static_cast<double>(max_norm) / (norm + 1e-6)) : 1.0;
      EXPECT_EQ(result.grad_norm, norm);
      EXPECT_EQ(result.grad_scale, static_cast<float>(clip / static_cast<double>(loss_scale)));
      EXPECT_EQ(result.skip, 0);
    }
  }
}

}  // namespace

GpuEnvironment& gpu() { return *environment; }

}  // namespace orlop::test

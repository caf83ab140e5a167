// Stochastic rounding of bf16 moments: the documented bits, without bias, without visible pattern.

#include <array>
#include <bit>
#include <cmath>

#include "adam_test_support.h"
#include "base/half.h"

namespace orlop::test {
namespace {

constexpr Layout kLayout{DType::kF32, DType::kBF16, DType::kF32};

// The generator as adam_kernel.h documents it.
uint32_t documented_random(const AdamRngKey& key, uint32_t index_low) {
  uint32_t x = index_low ^ key.first;
  x ^= x >> 16;
  x *= 0x21f0aaadu;
  x ^= key.second;
  x ^= x >> 15;
  x *= 0x735a2d97u;
  x ^= x >> 15;
  return x;
}

TEST(CpuAdamRounding, KeysArePinned) {
  // Checkpoints resume to the same bits only while these do not change.
  const AdamRngKey first = adam_rng_key(0, 1, 0);
  const AdamRngKey second = adam_rng_key(0x123456789abcdef0u, 1000, 3);
  EXPECT_EQ(first.first, 0x0f363a7du);
  EXPECT_EQ(first.second, 0x7ab40e09u);
  EXPECT_EQ(second.first, 0xeea0c925u);
  EXPECT_EQ(second.second, 0x875319e2u);
}

TEST(CpuAdamRounding, BitsAreTheDocumentedOnes) {
  constexpr int64_t kNumel = 3001;
  constexpr int64_t kOffset = 123456789012;
  const AdamHyper hyper{.step = 4, .seed = 99};
  for (const Isa isa : available_isas()) {
    const ScopedEnv limit("ORLOP_MAX_ISA", isa_name(isa));
    OwnedShard rounded(kLayout, kNumel, 1);
    OwnedShard exact({DType::kF32, DType::kF32, DType::kF32}, kNumel, 1);
    for (int64_t i = 0; i < kNumel; ++i)
      exact.set_moments(i, rounded.exp_avg(i), rounded.exp_avg_sq(i));
    AdamShard view = rounded.view();
    view.rng_offset = kOffset;
    adam_step(view, hyper, 1.0f, 2);
    adam_step(exact.view(), hyper, 1.0f, 2);
    for (int64_t i = 0; i < kNumel; ++i) {
      const auto index = static_cast<uint64_t>(kOffset + i);
      const AdamRngKey key = adam_rng_key(99, 4, static_cast<uint32_t>(index >> 32));
      const uint32_t random = documented_random(key, static_cast<uint32_t>(index));
      const auto expected = [](float value, uint32_t half) {
        return bf16_to_float(static_cast<uint16_t>((std::bit_cast<uint32_t>(value) + half) >> 16));
      };
      ASSERT_EQ(rounded.exp_avg(i), expected(exact.exp_avg(i), random & 0xffff)) << i;
      ASSERT_EQ(rounded.exp_avg_sq(i), expected(exact.exp_avg_sq(i), random >> 16)) << i;
      ASSERT_EQ(rounded.master(i), exact.master(i)) << "the update takes unrounded moments, " << i;
    }
  }
}

// beta1 = beta2 = 0 and g: the exact moments are g and g^2. Their means over many elements must
// agree to 5 standard errors of the rounding; nearest rounding of the same value is 60 times
// farther off.
TEST(CpuAdamRounding, IsUnbiased) {
  constexpr int64_t kNumel = 1 << 20;
  OwnedShard shard(kLayout, kNumel, 1);
  constexpr float kGrad = 1.0f + 0.3f * 0x1p-7f;
  for (int64_t i = 0; i < kNumel; ++i) shard.set_grad(i, kGrad);
  adam_step(shard.view(), {.beta1 = 0, .beta2 = 0, .step = 5, .seed = 1}, 1.0f, 2);
  double sum_m = 0, sum_v = 0;
  for (int64_t i = 0; i < kNumel; ++i) {
    sum_m += shard.exp_avg(i);
    sum_v += shard.exp_avg_sq(i);
  }
  const double standard_error = 0x1p-7 * 0.5 / std::sqrt(kNumel);
  EXPECT_NEAR(sum_m / kNumel, kGrad, 5 * standard_error);
  EXPECT_NEAR(sum_v / kNumel, static_cast<double>(kGrad) * kGrad, 5 * standard_error);
}

// A second moment that decays by less than half a unit a step would stand still under nearest
// rounding.
TEST(CpuAdamRounding, SecondMomentDecaysOverManySteps) {
  constexpr int64_t kNumel = 20000;
  constexpr int kSteps = 300;
  OwnedShard shard(kLayout, kNumel, 1);
  for (int64_t i = 0; i < kNumel; ++i) {
    shard.set_grad(i, 0);
    shard.set_moments(i, 0, 1);
  }
  AdamHyper hyper;
  for (int step = 1; step <= kSteps; ++step) {
    hyper.step = step;
    adam_step(shard.view(), hyper, 1.0f, 2);
  }
  double mean = 0;
  for (int64_t i = 0; i < kNumel; ++i) mean += shard.exp_avg_sq(i) / static_cast<double>(kNumel);
  EXPECT_NEAR(mean, std::pow(0.999, kSteps), 0.002);
}

// Chi-square over 256 cells of each half, between steps, between halves and between neighbours: 255
// degrees of freedom, mean 255, deviation 22.6; 370 is 5 deviations.
TEST(CpuAdamRounding, GeneratorIsUniformAndUncorrelated) {
  constexpr int kDraws = 1 << 20;
  enum { kLow, kHigh, kSteps, kHalves, kNeighbours, kBlocks, kCounts };
  std::array<std::array<int, 256>, kCounts> cells{};
  const AdamRngKey key = adam_rng_key(7, 1, 0);
  const AdamRngKey next_step = adam_rng_key(7, 2, 0);
  const AdamRngKey next_block = adam_rng_key(7, 1, 1);
  const auto top = [](uint32_t half) { return half >> 12 & 0xfu; };  // upper 4 bits of 16
  for (uint32_t i = 0; i < kDraws; ++i) {
    const uint32_t x = documented_random(key, i);
    const uint32_t y = documented_random(key, i + 1);
    const uint32_t s = documented_random(next_step, i);
    const uint32_t b = documented_random(next_block, i);
    const auto count = [&](int what, uint32_t cell) { ++cells[static_cast<size_t>(what)][cell]; };
    count(kLow, x >> 8 & 0xff);
    count(kHigh, x >> 24);
    count(kSteps, top(x & 0xffff) << 4 | top(s & 0xffff));
    count(kHalves, top(x & 0xffff) << 4 | top(x >> 16));
    count(kNeighbours, top(x >> 16) << 4 | top(y >> 16));
    count(kBlocks, top(x >> 16) << 4 | top(b >> 16));
  }
  for (size_t what = 0; what < kCounts; ++what) {
    double chi_square = 0;
    for (const int n : cells[what]) {
      const double expected = kDraws / 256.0;
      chi_square += (n - expected) * (n - expected) / expected;
    }
    EXPECT_LT(chi_square, 370) << "count " << what;
  }
}

TEST(CpuAdamRounding, SeedAndStepChangeTheBits) {
  const auto run = [](int64_t step, uint64_t seed) {
    OwnedShard shard(kLayout, 4000, 1);
    adam_step(shard.view(), {.beta1 = 0, .beta2 = 0, .step = step, .seed = seed}, 1.0f, 1);
    return shard;
  };
  const auto differing = [](const OwnedShard& a, const OwnedShard& b) {
    int64_t count = 0;
    for (int64_t i = 0; i < a.numel(); ++i) count += a.exp_avg(i) != b.exp_avg(i);
    return count;
  };
  const OwnedShard base = run(1, 1);
  EXPECT_EQ(differing(base, run(1, 1)), 0);
  // Two independent roundings of a uniform remainder differ in a third of the elements.
  EXPECT_NEAR(static_cast<double>(differing(base, run(2, 1))), 4000 / 3.0, 200);
  EXPECT_NEAR(static_cast<double>(differing(base, run(1, 2))), 4000 / 3.0, 200);
}

}  // namespace
}  // namespace orlop::test

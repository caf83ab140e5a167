#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "base/half.h"
#include "cpu_adam/adam.h"
#include "host/host_backend.h"
#include "host/kernels.h"
#include "host/matmul.h"

namespace orlop::host {
namespace {

struct NamedSet {
  const char* name;
  const KernelSet* set;
};

// The sets that this processor runs.
std::vector<NamedSet> kernel_sets() {
  std::vector<NamedSet> sets = {{"baseline", &kBaselineKernels}};
  if (active_isa() >= Isa::kAvx2) sets.push_back({"avx2", &kAvx2Kernels});
  if (active_isa() >= Isa::kAvx512) sets.push_back({"avx512", &kAvx512Kernels});
  return sets;
}

// Every value of fp16 and bf16, and every fp32 pattern that lies at or beside a rounding boundary.
TEST(HostKernels, ConversionsEqualTheScalarOnesBitForBit) {
  std::vector<uint16_t> halves(1 << 16);
  for (size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<uint16_t>(i);
  std::vector<float> floats;
  for (uint32_t high = 0; high < (1u << 16); ++high) {
    for (const uint32_t low :
         {0u, 1u, 0x0fffu, 0x1000u, 0x1001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      floats.push_back(std::bit_cast<float>((high << 16) | low));
    }
  }
  std::vector<float> widened(halves.size());
  std::vector<uint16_t> narrowed(floats.size());
  const auto same = [](float a, float b) {
    return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b) ||
           (std::isnan(a) && std::isnan(b));
  };
  for (const auto& [name, set] : kernel_sets()) {
    const auto n = static_cast<int64_t>(halves.size());
    const auto m = static_cast<int64_t>(floats.size());
    set->bf16.widen(halves.data(), widened.data(), n);
    for (size_t i = 0; i < halves.size(); ++i) {
      ASSERT_TRUE(same(widened[i], bf16_to_float(halves[i]))) << name << " bf16 " << i;
    }
    set->f16.widen(halves.data(), widened.data(), n);
    for (size_t i = 0; i < halves.size(); ++i) {
      ASSERT_TRUE(same(widened[i], fp16_to_float(halves[i]))) << name << " fp16 " << i;
    }
    set->bf16.narrow(floats.data(), narrowed.data(), m);
    for (size_t i = 0; i < floats.size(); ++i) {
      const uint16_t expected = float_to_bf16(floats[i]);
      ASSERT_TRUE(narrowed[i] == expected || std::isnan(floats[i]))
          << name << " bf16 of " << floats[i];
      ASSERT_EQ(std::isnan(bf16_to_float(narrowed[i])), std::isnan(floats[i])) << name;
    }
    set->f16.narrow(floats.data(), narrowed.data(), m);
    for (size_t i = 0; i < floats.size(); ++i) {
      const uint16_t expected = float_to_fp16(floats[i]);
      ASSERT_TRUE(narrowed[i] == expected || std::isnan(floats[i]))
          << name << " fp16 of " << floats[i];
      ASSERT_EQ(std::isnan(fp16_to_float(narrowed[i])), std::isnan(floats[i])) << name;
    }
  }
}

TEST(HostKernels, ProbabilitiesFollowTheExponentialOverItsWholeRange) {
  std::vector<float> logits;
  for (float x = -100.0f; x <= 0.0f; x += 0.01f) logits.push_back(x);
  logits.push_back(0.0f);
  double total = 0;
  for (const float x : logits) total += std::exp(static_cast<double>(x));
  for (const auto& [name, set] : kernel_sets()) {
    std::vector<float> gradient = logits;
    const auto vocab = static_cast<int64_t>(logits.size());
    set->f32.cross_entropy({gradient.data(), vocab, vocab - 1, 1.0f, true});
    for (size_t i = 0; i + 1 < logits.size(); ++i) {
      const double expected = std::exp(static_cast<double>(logits[i])) / total;
      // Below e^-87 the result may be zero; the sum of 10001 terms leaves about 1e-6.
      ASSERT_NEAR(static_cast<double>(gradient[i]), expected, 3e-6 * expected + 1e-38)
          << name << " at " << logits[i];
    }
  }
}

TEST(HostKernels, ANaNStaysANaN) {
  const float nan = std::nanf("");
  for (const auto& [name, set] : kernel_sets()) {
    std::vector<float> in(40, 0.5f), out(20), logits(100, 1.0f);
    in[3] = nan;
    set->f32.swiglu(in.data(), out.data(), 20);
    EXPECT_TRUE(std::isnan(out[3])) << name << " swiglu";
    EXPECT_FALSE(std::isnan(out[4])) << name << " swiglu";
    set->f32.gelu_tanh(in.data(), out.data(), 20);
    EXPECT_TRUE(std::isnan(out[3])) << name << " gelu_tanh";
    set->f32.gelu(in.data(), out.data(), 20);
    EXPECT_TRUE(std::isnan(out[3])) << name << " gelu";
    logits[77] = nan;
    EXPECT_TRUE(std::isnan(set->f32.cross_entropy({logits.data(), 100, 5, 1.0f, true}))) << name;
  }
}

TEST(HostKernels, BlockProductEqualsTheReferenceForEveryTail) {
  std::mt19937 random(3);
  std::uniform_int_distribution<int> digit(-8, 8);  // exact in fp32, so equality is exact
  for (const auto& [name, set] : kernel_sets()) {
    for (const int64_t m : {1, 2, 5, 6, 7, 13}) {
      for (const int64_t n : {16, 48, 64, 80, 144}) {
        for (const bool accumulate : {false, true}) {
          const int64_t k = 19;
          std::vector<float> a(static_cast<size_t>(m * k)), b(static_cast<size_t>(k * n));
          std::vector<float> c(static_cast<size_t>(m * n));
          for (auto* values : {&a, &b, &c}) {
            for (float& value : *values) value = static_cast<float>(digit(random));
          }
          std::vector<float> expected = c;
          kReferenceKernels.block_product(
              {a.data(), b.data(), expected.data(), m, n, k, 1, m, n, n, accumulate});
          set->block_product({a.data(), b.data(), c.data(), m, n, k, 1, m, n, n, accumulate});
          ASSERT_EQ(c, expected) << name << " m " << m << " n " << n;
        }
      }
    }
  }
}

// The matmul of builds without oneDNN, against the reference on exact inputs.
TEST(BlockedMatmul, EqualsTheReferenceForEveryDtypeAndTransposition) {
  std::mt19937 random(5);
  std::uniform_int_distribution<int> digit(-2, 2);
  const int64_t m = 101, n = 131, k = 300;
  const auto reference = make_reference_matmul(1);
  for (const auto& [name, set] : kernel_sets()) {
    const auto blocked = make_blocked_matmul(*set, 2);
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (int transposes = 0; transposes < 4; ++transposes) {
        std::vector<float> values(static_cast<size_t>(m * k + k * n + n));
        for (float& value : values) value = static_cast<float>(digit(random));
        std::vector<std::byte> in(values.size() * dtype_bytes(dtype));
        kernels_of(*set, dtype)
            .narrow(values.data(), in.data(), static_cast<int64_t>(values.size()));
        MatmulArgs args;
        args.a = in.data();
        args.b = in.data() + static_cast<size_t>(m * k) * dtype_bytes(dtype);
        args.bias = in.data() + static_cast<size_t>(m * k + k * n) * dtype_bytes(dtype);
        args.m = m, args.n = n, args.k = k;
        args.trans_a = transposes & 1, args.trans_b = transposes & 2;
        args.lda = args.trans_a ? m : k, args.ldb = args.trans_b ? k : n, args.ldc = n;
        args.accumulate = true;
        args.in_dtype = dtype;
        std::vector<float> actual(static_cast<size_t>(m * n), 1.0f), expected = actual;
        args.c = actual.data();
        blocked->run(args);
        args.c = expected.data();
        reference->run(args);
        ASSERT_EQ(actual, expected) << name << " " << dtype_name(dtype) << " " << transposes;
      }
    }
  }
}

}  // namespace
}  // namespace orlop::host

// The arithmetic against torch's formula in fp64, and the values at the edge of the formats.

#include <xmmintrin.h>

#include <bit>
#include <cmath>

#include "adam_test_support.h"
#include "base/half.h"

namespace orlop::test {
namespace {

class EveryLayoutFormula : public ::testing::TestWithParam<Layout> {};

// One step from known states: the error is that of a few fp32 roundings.
TEST_P(EveryLayoutFormula, OneStepEqualsTheFormulaInFp64) {
  for (const Isa isa : available_isas()) {
    const ScopedEnv limit("ORLOP_MAX_ISA", isa_name(isa));
    for (const bool decoupled : {true, false}) {
      for (const bool maximize : {true, false}) {
        const AdamHyper hyper{.lr = 0.01,
                              .beta1 = 0.8,
                              .beta2 = 0.95,
                              .eps = 1e-6,
                              .weight_decay = 0.2,
                              .decoupled = decoupled,
                              .maximize = maximize,
                              .step = 7};
        OwnedShard shard(GetParam(), 1031, 3);
        const OwnedShard before = shard;
        constexpr float kScale = 0.37f;
        adam_step(shard.view(), hyper, kScale, 2);
        for (int64_t i = 0; i < shard.numel(); ++i) {
          ReferenceElement reference{before.master(i), before.exp_avg(i), before.exp_avg_sq(i)};
          reference.step(static_cast<double>(before.grad(i)) * kScale, hyper);
          constexpr double kUnit = 0x1p-24;  // half a unit in the last place, relative
          ASSERT_NEAR(shard.master(i), reference.p, 4 * kUnit * (std::abs(reference.p) + 0.05))
              << "element " << i << ", " << isa_name(isa);
          // bf16 moments are rounded up or down by at most one unit of 2^-7 relative.
          const double moment_unit = GetParam().moment == DType::kF32 ? 8 * kUnit : 0x1p-7;
          ASSERT_NEAR(shard.exp_avg(i), reference.m,
                      moment_unit * std::abs(reference.m) + 8 * kUnit * 0.05)
              << i;
          ASSERT_NEAR(shard.exp_avg_sq(i), reference.v, moment_unit * reference.v + 1e-12) << i;
        }
      }
    }
  }
}

TEST_P(EveryLayoutFormula, ComputeCopyIsTheRoundedMaster) {
  OwnedShard shard(GetParam(), 5003, 3);
  for (int step = 1; step <= 5; ++step) {
    adam_step(shard.view(), {.lr = 0.01, .step = step}, 1.0f, 2);
    for (int64_t i = 0; i < shard.numel(); ++i) {
      const float master = shard.master(i);
      if (GetParam().compute == DType::kBF16) {
        const auto bits = std::bit_cast<uint32_t>(master);
        ASSERT_EQ(shard.hi(i), (bits + 0x8000u) >> 16) << i;
      } else if (GetParam().compute == DType::kF16) {
        ASSERT_EQ(shard.hi(i), float_to_fp16(master)) << i;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(CpuAdam, EveryLayoutFormula, ::testing::ValuesIn(all_layouts()),
                         [](const auto& info) { return layout_name(info.param); });

// 200 steps with weight decay 0.1 and a learning rate changed at steps 50 and 120, in both
// flavours. The split master is held to the same yardstick as a plain one: it is the same fp32
// number.
TEST(CpuAdamFormula, BothFlavoursFollowTheirTorchTwinsFor200Steps) {
  for (const Layout& layout : {Layout{DType::kF32, DType::kF32, DType::kF32},
                               Layout{DType::kBF16, DType::kF32, DType::kF32},
                               Layout{DType::kBF16, DType::kF32, DType::kBF16},
                               Layout{DType::kF16, DType::kF32, DType::kF16}}) {
    double flavours_differ = 0;
    std::vector<float> adamw;
    for (const bool decoupled : {true, false}) {
      AdamHyper hyper{.lr = 1e-3, .weight_decay = 0.1, .decoupled = decoupled};
      OwnedShard shard(layout, 2003, 12);
      std::vector<ReferenceElement> reference;
      for (int64_t i = 0; i < shard.numel(); ++i) {
        shard.set_moments(i, 0, 0);
        reference.push_back({shard.master(i), 0, 0});
      }
      for (int step = 1; step <= 200; ++step) {
        if (step == 50) hyper.lr = 3e-4;
        if (step == 120) hyper.lr = 2e-3;
        hyper.step = step;
        shard.fill_grad(static_cast<uint64_t>(1000 + step));
        adam_step(shard.view(), hyper, 1.0f, 2);
        for (int64_t i = 0; i < shard.numel(); ++i) {
          reference[static_cast<size_t>(i)].step(shard.grad(i), hyper);
        }
      }
      for (int64_t i = 0; i < shard.numel(); ++i) {
        ASSERT_TRUE(near_reference(shard.master(i), reference[static_cast<size_t>(i)].p, i))
            << layout_name(layout) << (decoupled ? " AdamW" : " Adam");
        if (decoupled) {
          adamw.push_back(shard.master(i));
        } else {
          flavours_differ = std::max<double>(
              flavours_differ, std::abs(shard.master(i) - adamw[static_cast<size_t>(i)]));
        }
      }
    }
    EXPECT_GT(flavours_differ, 1e-3) << "the two flavours are one";
  }
}

TEST(CpuAdamFormula, ScaleOfTheGradientIsFusedExactly) {
  const Layout layout{DType::kF32, DType::kF32, DType::kF32};
  OwnedShard scaled(layout, 1000, 1);
  OwnedShard plain(layout, 1000, 1);
  for (int64_t i = 0; i < 1000; ++i) plain.set_grad(i, plain.grad(i) * 0.0625f);
  adam_step(scaled.view(), {}, 0.0625f, 1);
  adam_step(plain.view(), {}, 1.0f, 1);
  for (int64_t i = 0; i < 1000; ++i) {
    ASSERT_EQ(scaled.master(i), plain.master(i)) << i;
    ASSERT_EQ(scaled.exp_avg_sq(i), plain.exp_avg_sq(i)) << i;
  }
}

TEST(CpuAdamFormula, NanStaysNanInEveryPlane) {
  for (const Layout& layout : all_layouts()) {
    for (const Isa isa : available_isas()) {
      const ScopedEnv limit("ORLOP_MAX_ISA", isa_name(isa));
      // Payloads that a careless rounding would turn into Inf (small) or zero (all ones).
      for (const uint32_t payload : {0x7fc00000u, 0x7f800001u, 0x7fffffffu, 0xffffffffu}) {
        OwnedShard shard(layout, 40, 1);
        shard.set_grad(3, std::bit_cast<float>(payload));
        if (layout.compute != DType::kBF16) shard.set_master(5, std::bit_cast<float>(payload));
        adam_step(shard.view(), {}, 1.0f, 1);
        EXPECT_TRUE(std::isnan(shard.exp_avg(3))) << layout_name(layout);
        EXPECT_TRUE(std::isnan(shard.exp_avg_sq(3))) << layout_name(layout);
        for (const int64_t i : {int64_t{3}, int64_t{5}}) {
          if (i == 5 && layout.compute == DType::kBF16) continue;
          EXPECT_TRUE(std::isnan(shard.master(i))) << layout_name(layout) << " element " << i;
          if (layout.compute != DType::kF32) {
            EXPECT_TRUE(std::isnan(shard.compute_copy(i))) << layout_name(layout);
          }
        }
        EXPECT_TRUE(std::isfinite(shard.master(4)));
      }
    }
  }
}

TEST(CpuAdamFormula, InfiniteGradientGivesTorchsResult) {
  OwnedShard shard({DType::kF32, DType::kF32, DType::kF32}, 20, 1);
  shard.set_grad(2, INFINITY);
  shard.set_grad(17, -INFINITY);
  adam_step(shard.view(), {}, 1.0f, 1);
  EXPECT_EQ(shard.exp_avg(2), INFINITY);
  EXPECT_EQ(shard.exp_avg(17), -INFINITY);
  EXPECT_EQ(shard.exp_avg_sq(2), INFINITY);
  EXPECT_TRUE(std::isnan(shard.master(2))) << "inf / inf";
}

// States and updates below 2^-126 survive even when the caller's thread flushes them, on every
// thread of the team, and the caller's register comes back as it was.
TEST(CpuAdamFormula, SubnormalsAreKeptWhateverTheCallersModes) {
  constexpr unsigned kFlushAll = 0x8040;  // FTZ and DAZ
  constexpr unsigned kRoundToZero = 0x6000;
  for (const Layout& layout : all_layouts()) {
    for (const Isa isa : available_isas()) {
      const ScopedEnv limit("ORLOP_MAX_ISA", isa_name(isa));
      const auto make = [&] {
        OwnedShard shard(layout, 5000, 1);
        for (int64_t i = 0; i < shard.numel(); ++i) {
          shard.set_master(i, 1e-39f + 1e-42f * static_cast<float>(i % 100));
          shard.set_moments(i, 3e-40f, 2e-39f);
          shard.set_grad(i, 0);
        }
        return shard;
      };
      const AdamHyper hyper{.lr = 1e-38, .eps = 0, .step = 100};
      OwnedShard expected = make();
      adam_step(expected.view(), hyper, 1.0f, 2);
      OwnedShard shard = make();
      const unsigned before = _mm_getcsr();
      const unsigned changed = 0x1f80 | kFlushAll | kRoundToZero;
      _mm_setcsr(changed);
      adam_step(shard.view(), hyper, 1.0f, 2);
      const unsigned after = _mm_getcsr();
      _mm_setcsr(before);
      EXPECT_EQ(after, changed);
      ASSERT_TRUE(same_bits(shard, expected)) << isa_name(isa);
      EXPECT_NE(shard.master(7), 0.0f);
      EXPECT_NE(shard.exp_avg(4999), 0.0f);
    }
  }
}

TEST(CpuAdamFormula, LeavesTheFlagsOfTheCallerAlone) {
  OwnedShard shard({DType::kF32, DType::kF32, DType::kF32}, 100, 1);
  const unsigned before = _mm_getcsr();
  _mm_setcsr(0x1f80);  // no exception flag set; the step raises "inexact"
  adam_step(shard.view(), {}, 1.0f, 1);
  const unsigned after = _mm_getcsr();
  _mm_setcsr(before);
  EXPECT_EQ(after, 0x1f80u);
}

}  // namespace
}  // namespace orlop::test

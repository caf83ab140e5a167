// Rates of chips whose data sheets and measurements are known, from what a driver tells of them.
#include "gpu/typical_rates.h"

#include <gtest/gtest.h>

namespace orlop::test {
namespace {

struct Known {
  const char* name;
  ChipTraits chip;
  double peak_flop_per_s;  // data sheet: bf16, fp32 sums, dense
  double memory_bytes_per_s;
};

constexpr Known kKnown[] = {
    {"A100 SXM", {8, 0, 108, 1.41e9, 1.215e9, 5120}, 312e12, 1.555e12},
    {"RTX 3090", {8, 6, 82, 1.695e9, 9.751e9, 384}, 71e12, 0.936e12},
    {"RTX 4090", {8, 9, 128, 2.52e9, 10.501e9, 384}, 165e12, 1.008e12},
    {"H100 SXM", {9, 0, 132, 1.98e9, 2.619e9, 5120}, 989e12, 3.35e12},
    {"RTX 5090", {12, 0, 170, 2.407e9, 14.001e9, 512}, 209.5e12, 1.792e12},
};

TEST(TypicalRates, AreBelowTheDataSheetAndNotFarBelow) {
  for (const Known& known : kKnown) {
    const TypicalRates rates = typical_rates(known.chip);
    EXPECT_LT(rates.matmul_flop_per_s, known.peak_flop_per_s) << known.name;
    EXPECT_GT(rates.matmul_flop_per_s, 0.65 * known.peak_flop_per_s) << known.name;
    EXPECT_NEAR(rates.device_bytes_per_s, 0.9 * known.memory_bytes_per_s,
                0.02 * known.memory_bytes_per_s)
        << known.name;
    EXPECT_GT(rates.link_bytes_per_s, 2e10) << known.name;
  }
}

// bench_gpu_ops: 8192^3 at 789 to 799 TFLOPS, large matmuls of models at 590 to 813; copies at 3.0
// TB/s.
TEST(TypicalRates, OfAnH100AreThoseThatWereMeasured) {
  const TypicalRates rates = typical_rates(kKnown[3].chip);
  EXPECT_NEAR(rates.matmul_flop_per_s, 711e12, 0.02 * 711e12);
  EXPECT_NEAR(rates.device_bytes_per_s, 3.0e12, 0.02 * 3.0e12);
}

TEST(TypicalRates, OfAnUnknownChipAreNone) {
  const TypicalRates rates = typical_rates({99, 0, 100, 1e9, 1e9, 1024});
  EXPECT_EQ(rates.matmul_flop_per_s, 0);
  EXPECT_EQ(rates.link_bytes_per_s, 0);
}

}  // namespace
}  // namespace orlop::test

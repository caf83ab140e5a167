#include "base/half.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace orlop {
namespace {

// The value of a 16-bit pattern by the definition of the format: sign, `exponent_bits`, the rest.
double decode(uint16_t bits, int exponent_bits) {
  const int mantissa_bits = 15 - exponent_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) {
    return mantissa == 0 ? sign * std::numeric_limits<double>::infinity()
                         : std::numeric_limits<double>::quiet_NaN();
  }
  const double fraction = std::ldexp(mantissa, -mantissa_bits);
  return exponent == 0 ? sign * std::ldexp(fraction, 1 - bias)
                       : sign * std::ldexp(1.0 + fraction, exponent - bias);
}

struct Format {
  const char* name;
  int exponent_bits;
  float (*to_float)(uint16_t);
  uint16_t (*from_float)(float);
  uint16_t infinity;
};

class HalfTest : public ::testing::TestWithParam<Format> {
 protected:
  bool is_nan(uint16_t bits) const { return (bits & 0x7fff) > GetParam().infinity; }
};

TEST_P(HalfTest, EveryPatternDecodesByDefinitionAndComesBack) {
  const Format& format = GetParam();
  for (uint32_t pattern = 0; pattern <= 0xffff; ++pattern) {
    const auto bits = static_cast<uint16_t>(pattern);
    const float value = format.to_float(bits);
    const uint16_t back = format.from_float(value);
    if (is_nan(bits)) {
      ASSERT_TRUE(std::isnan(value)) << pattern;
      ASSERT_TRUE(is_nan(back)) << pattern;
      ASSERT_EQ(std::signbit(value), (bits & 0x8000) != 0) << pattern;
      continue;
    }
    const auto expected = static_cast<float>(decode(bits, format.exponent_bits));
    ASSERT_EQ(std::bit_cast<uint32_t>(value), std::bit_cast<uint32_t>(expected)) << pattern;
    ASSERT_EQ(back, bits) << pattern;
  }
}

// Between each two neighbours the tie goes to the even pattern and one ulp of fp32 to either side
// of the tie to the nearer one; so rounding is nearest-even on every float there is, for it is
// monotonic.
TEST_P(HalfTest, RoundsToNearestEvenBetweenAllNeighbours) {
  const Format& format = GetParam();
  for (uint16_t low = 0; low < format.infinity; ++low) {
    const auto high = static_cast<uint16_t>(low + 1);
    const double below = decode(low, format.exponent_bits);
    // The neighbour of the largest number is where the next power of two would be.
    const double above =
        high == format.infinity
            ? 2 * below - decode(static_cast<uint16_t>(low - 1), format.exponent_bits)
            : decode(high, format.exponent_bits);
    const auto tie = static_cast<float>((below + above) / 2);
    ASSERT_EQ(static_cast<double>(tie), (below + above) / 2) << "a tie is exact in fp32";
    const uint16_t even = (low & 1) == 0 ? low : high;
    const float inf = std::numeric_limits<float>::infinity();
    for (const float sign : {1.0f, -1.0f}) {
      const auto signed_bits = [&](uint16_t bits) {
        return static_cast<uint16_t>(bits | (sign < 0 ? 0x8000 : 0));
      };
      ASSERT_EQ(format.from_float(sign * tie), signed_bits(even)) << low;
      ASSERT_EQ(format.from_float(sign * std::nextafter(tie, 0.0f)), signed_bits(low)) << low;
      ASSERT_EQ(format.from_float(sign * std::nextafter(tie, inf)), signed_bits(high)) << low;
    }
  }
}

TEST_P(HalfTest, IsMonotonic) {
  const Format& format = GetParam();
  uint16_t previous = 0;
  // A prime stride over all non-negative floats, infinity included.
  for (uint64_t bits = 0; bits <= 0x7f800000u; bits += 251) {
    const uint16_t value = format.from_float(std::bit_cast<float>(static_cast<uint32_t>(bits)));
    ASSERT_GE(value, previous) << bits;
    previous = value;
  }
  EXPECT_EQ(format.from_float(std::numeric_limits<float>::infinity()), format.infinity);
  EXPECT_EQ(format.from_float(std::numeric_limits<float>::max()), format.infinity);
}

TEST_P(HalfTest, ANanNeverBecomesInfinity) {
  const Format& format = GetParam();
  for (uint32_t bits = 0x7f800001u; bits < 0x80000000u; bits += 65'521) {
    ASSERT_TRUE(is_nan(format.from_float(std::bit_cast<float>(bits)))) << bits;
    ASSERT_TRUE(is_nan(format.from_float(std::bit_cast<float>(bits | 0x80000000u)))) << bits;
  }
  EXPECT_TRUE(is_nan(format.from_float(std::bit_cast<float>(0x7f800001u))));
  EXPECT_TRUE(is_nan(format.from_float(std::bit_cast<float>(0x7fffffffu))));
}

INSTANTIATE_TEST_SUITE_P(Formats, HalfTest,
                         ::testing::Values(Format{"fp16", 5, fp16_to_float, float_to_fp16, 0x7c00},
                                           Format{"bf16", 8, bf16_to_float, float_to_bf16, 0x7f80}),
                         [](const auto& info) { return std::string(info.param.name); });

// Every value whose upper half is none of a NaN's comes back from its two planes, and a rest that
// somebody left below a zero is none.
TEST(Half, SplitValuesComeBack) {
  for (uint32_t high = 0; high <= 0xffff; ++high) {
    for (const uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      const uint32_t bits = high << 16 | low;
      if ((bits & 0x7fffffffu) > 0x7f800000u) continue;
      const auto value = static_cast<uint16_t>((bits + 0x8000u) >> 16);
      const float joined = split_bf16_to_float(value, static_cast<uint16_t>(low));
      ASSERT_EQ(std::bit_cast<uint32_t>(joined), bits);
    }
  }
  for (uint32_t rest = 0; rest <= 0xffff; ++rest) {
    const uint32_t expected = rest < 0x8000u ? rest : 0;
    const auto low = static_cast<uint16_t>(rest);
    ASSERT_EQ(std::bit_cast<uint32_t>(split_bf16_to_float(0, low)), expected);
    ASSERT_EQ(std::bit_cast<uint32_t>(split_bf16_to_float(0x8000, low)), 0x80000000u | expected);
  }
}

#ifdef __FLT16_MAX__
// The compiler's own type as a second witness.
TEST(Half, Fp16AgreesWithTheCompiler) {
  for (uint64_t bits = 0; bits <= 0xffffffffu; bits += 641) {
    const auto value = std::bit_cast<float>(static_cast<uint32_t>(bits));
    if (std::isnan(value)) continue;
    ASSERT_EQ(float_to_fp16(value), std::bit_cast<uint16_t>(static_cast<_Float16>(value))) << bits;
  }
}
#endif

}  // namespace
}  // namespace orlop

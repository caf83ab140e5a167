#include "base/bytes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "base/check.h"

namespace orlop {
namespace {

using ::testing::HasSubstr;

TEST(Bytes, ParsesEveryUnit) {
  const std::pair<const char*, size_t> cases[] = {
      {"0", 0},
      {"4096", 4096},
      {"17B", 17},
      {"1k", kKiB},
      {"3 KiB", 3 * kKiB},
      {"512M", 512 * kMiB},
      {"24GiB", 24 * kGiB},
      {"24gib", 24 * kGiB},
      {"24 GB", 24'000'000'000},
      {"900MB", 900'000'000},
      {"2kb", 2000},
      {"1.5GiB", kGiB + kGiB / 2},
      {"2T", 2048 * kGiB},
      {"1 tb", 1'000'000'000'000},
      {"1e3", 1000},
  };
  for (const auto& [text, bytes] : cases) EXPECT_EQ(parse_bytes(text, "x"), bytes) << text;
}

TEST(Bytes, RefusesWithTheFieldAndTheText) {
  for (const char* text : {"", "GiB", "-1", "-1GiB", "12 parsecs", "1..5G", "0x10", "nan", "inf",
                           "1e30", "9223372036854775808", "5 G i B x", "--", " 5"}) {
    try {
      const size_t bytes = parse_bytes(text, "--device-budget");
      ADD_FAILURE() << "'" << text << "' was read as " << bytes;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUsage);
      EXPECT_THAT(error.what(), HasSubstr("--device-budget"));
      EXPECT_THAT(error.what(), HasSubstr("'" + std::string(text) + "'"));
    }
  }
}

TEST(Bytes, FormatsForPeople) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(1536), "1.5 KiB");
  EXPECT_EQ(format_bytes(312 * kMiB), "312.0 MiB");
  EXPECT_EQ(format_bytes(kGiB + kGiB / 2), "1.50 GiB");
}

TEST(Bytes, AlignsAndDivides) {
  EXPECT_EQ(align_up(0, 256), 0u);
  EXPECT_EQ(align_up(1, 256), 256u);
  EXPECT_EQ(align_up(256, 256), 256u);
  EXPECT_EQ(align_up(257, 256), 512u);
  EXPECT_EQ(ceil_div(0, 3), 0);
  EXPECT_EQ(ceil_div(7, 3), 3);
  EXPECT_EQ(ceil_div(9, 3), 3);
}

TEST(Check, FormatsAndCarriesTheCode) {
  check(true, ErrorCode::kIo, "never");
  try {
    check(false, ErrorCode::kIo, "{} of {}", 3, "four");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kIo);
    EXPECT_STREQ(error.what(), "3 of four");
  }
}

TEST(Check, AnInvariantNamesItsPlace) {
  ORLOP_INVARIANT(1 + 1 == 2);
  try {
    ORLOP_INVARIANT(1 + 1 == 3);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInternal);
    EXPECT_THAT(error.what(), HasSubstr("bytes_test.cc:"));
    EXPECT_THAT(error.what(), HasSubstr("1 + 1 == 3"));
  }
}

TEST(Check, ExitCodes) {
  EXPECT_EQ(exit_code(ErrorCode::kUsage), 2);
  EXPECT_EQ(exit_code(ErrorCode::kDoesNotFit), 3);
  EXPECT_EQ(exit_code(ErrorCode::kInvalidData), 4);
  EXPECT_EQ(exit_code(ErrorCode::kIo), 1);
  EXPECT_EQ(exit_code(ErrorCode::kInternal), 1);
}

}  // namespace
}  // namespace orlop

// How host memory is registered in pieces, against a driver with limits of its own. The addresses
// lie beyond those of any memory; nobody looks there.
#include "gpu/pinned_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "orlop/error.h"

namespace orlop::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Takes ranges up to `most_at_once`, together up to `most`.
class LimitedDriver {
 public:
  explicit LimitedDriver(size_t most_at_once, size_t most = SIZE_MAX)
      : most_at_once_(most_at_once), most_(most) {}

  PinCalls calls() {
    return {.pin = [this](void* address, size_t bytes) -> std::string {
              if (bytes > most_at_once_) return "too much at once";
              if (pinned_bytes_ + bytes > most_) return "no more";
              ranges_[static_cast<std::byte*>(address)] = bytes;
              pinned_bytes_ += bytes;
              return "";
            },
            .unpin =
                [this](void* address) {
                  const auto range = ranges_.find(static_cast<std::byte*>(address));
                  ASSERT_NE(range, ranges_.end());
                  pinned_bytes_ -= range->second;
                  ranges_.erase(range);
                }};
  }

  size_t pinned_bytes() const { return pinned_bytes_; }
  const std::map<std::byte*, size_t>& ranges() const { return ranges_; }
  void set_most(size_t most) { most_ = most; }

 private:
  const size_t most_at_once_;
  size_t most_;
  size_t pinned_bytes_ = 0;
  std::map<std::byte*, size_t> ranges_;
};

std::byte* const kBegin = reinterpret_cast<std::byte*>(uintptr_t{1} << 60);

TEST(PinnedMemory, ARangeIsCutIntoWhatTheDriverTakes) {
  for (const size_t most_at_once : {size_t{1} << 62, kGiB, 100 * kMiB + 12345}) {
    LimitedDriver driver(most_at_once);
    const size_t bytes = 512 * kGiB + 4096;
    {
      PinnedMemory pinned(driver.calls());
      pinned.add(kBegin, bytes);
      EXPECT_EQ(pinned.bytes(), bytes);
      const std::byte* next = kBegin;
      for (const auto& [address, length] : driver.ranges()) {
        EXPECT_EQ(address, next);
        EXPECT_LE(length, most_at_once);
        EXPECT_GE(length, next + length == kBegin + bytes ? 1 : 32 * kMiB) << "no crumbs";
        next = address + length;
      }
      EXPECT_EQ(next, kBegin + bytes);
    }
    EXPECT_EQ(driver.pinned_bytes(), 0u) << "taken back at the end";
  }
}

// A copy goes piece by piece: none crosses from one registration to the next, nothing is left out.
TEST(PinnedMemory, CopiesAreCutWhereRegistrationsMeet) {
  LimitedDriver driver(kGiB);
  PinnedMemory pinned(driver.calls());
  pinned.add(kBegin, 5 * kGiB);
  const size_t begin = kGiB - 1000;
  const size_t bytes = 3 * kGiB + 5000;
  size_t next = 0;
  pinned.for_each_piece(kBegin + begin, bytes, [&](size_t offset, size_t part) {
    EXPECT_EQ(offset, next);
    EXPECT_GT(part, 0u);
    const auto range = std::prev(driver.ranges().upper_bound(kBegin + begin + offset));
    EXPECT_LE(kBegin + begin + offset + part, range->first + range->second) << "crosses its end";
    next = offset + part;
  });
  EXPECT_EQ(next, bytes);
}

TEST(PinnedMemory, ARefusalNamesTheAmountsAndLeavesNothing) {
  LimitedDriver driver(kGiB, 10 * kGiB);
  PinnedMemory pinned(driver.calls());
  pinned.add(kBegin, 4 * kGiB);
  std::string text;
  try {
    pinned.add(kBegin + 100 * kGiB, 16 * kGiB);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
    text = error.what();
  }
  EXPECT_THAT(text, AllOf(HasSubstr("16.00 GiB asked for, 6.00 GiB of it pinned"),
                          HasSubstr("no more"), HasSubstr("4.00 GiB were pinned before"),
                          HasSubstr("Lower the host memory budget"), HasSubstr("ulimit -l")));
  EXPECT_EQ(driver.pinned_bytes(), 4 * kGiB) << "what was there before stays, and nothing else";
  EXPECT_EQ(pinned.bytes(), 4 * kGiB);
  driver.set_most(20 * kGiB);
  pinned.add(kBegin + 100 * kGiB, 16 * kGiB);
  EXPECT_EQ(pinned.bytes(), 20 * kGiB);
}

}  // namespace
}  // namespace orlop::test

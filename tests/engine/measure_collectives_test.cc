// The rate of collectives that `orlop doctor --measure` keeps, among threads in host memory.
#include "engine/measure_collectives.h"

#include <gtest/gtest.h>

#include "zero/hardware_profile.h"

namespace orlop::test {
namespace {

TEST(MeasureCollectives, CountsWhatARankReceives) {
  for (const int ranks : {2, 3}) {
    const double rate = measure_collectives("host", ranks);
    EXPECT_GT(rate, 1e6) << ranks;
    EXPECT_LT(rate, 1e12) << ranks;
  }
}

TEST(MeasureCollectives, AreInTheProfileOnlyWhereTheyWereMeasured) {
  HardwareProfile profile;
  EXPECT_EQ(profile.to_json().find("collective"), std::string::npos);
  profile.collective_is_measured = true;
  profile.collective_bytes_per_s = 2.5e11;
  EXPECT_NE(profile.to_json().find("\"collective_bytes_per_s\": 250000000000.0"), std::string::npos)
      << profile.to_json();
}

}  // namespace
}  // namespace orlop::test

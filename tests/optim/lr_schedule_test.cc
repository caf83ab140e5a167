#include "optim/lr_schedule.h"

#include <gtest/gtest.h>

#include <vector>

#include "orlop/error.h"

namespace orlop {
namespace {

struct TableRow {
  LrScheduleConfig config;
  std::vector<double> rates;  // of steps 0, 1, ...
};

const std::vector<TableRow>& table() {
  static const std::vector<TableRow> rows{
#include "lr_table.inc"
  };
  return rows;
}

TEST(LrScheduleTest, GivesTheDoublesOfTransformers) {
  for (size_t i = 0; i < table().size(); ++i) {
    const TableRow& row = table()[i];
    const LrSchedule schedule(row.config);
    for (size_t step = 0; step < row.rates.size(); ++step) {
      const auto at = static_cast<int64_t>(step);
      // The lambda of a cosine rises again beyond the run; this schedule stays at its floor.
      if (row.config.kind == LrScheduleKind::kCosine && at > row.config.total_steps) continue;
      EXPECT_EQ(schedule(at), row.rates[step]) << "row " << i << ", step " << step;
    }
  }
}

TEST(LrScheduleTest, StaysAtTheFloorBeyondTheRun) {
  for (const auto kind : {LrScheduleKind::kLinear, LrScheduleKind::kCosine, LrScheduleKind::kWsd}) {
    LrScheduleConfig config{.kind = kind, .peak_lr = 1.0, .total_steps = 10, .warmup_steps = 2};
    config.decay_steps = 4;
    config.min_ratio = 0.25;
    const LrSchedule schedule(config);
    for (const int64_t step : {10, 11, 15, 1000}) EXPECT_DOUBLE_EQ(schedule(step), 0.25);
  }
}

TEST(LrScheduleTest, RefusesNumbersThatMakeNoSchedule) {
  const LrScheduleConfig good{.kind = LrScheduleKind::kWsd,
                              .peak_lr = 1e-3,
                              .total_steps = 10,
                              .warmup_steps = 4,
                              .decay_steps = 6};
  EXPECT_NO_THROW(LrSchedule{good});
  auto refused = [&](auto change) {
    LrScheduleConfig config = good;
    change(config);
    EXPECT_THROW(LrSchedule{config}, Error);
  };
  refused([](LrScheduleConfig& c) { c.peak_lr = -1e-3; });
  refused([](LrScheduleConfig& c) { c.peak_lr = std::numeric_limits<double>::quiet_NaN(); });
  refused([](LrScheduleConfig& c) { c.min_ratio = 1.5; });
  refused([](LrScheduleConfig& c) { c.warmup_steps = -1; });
  refused([](LrScheduleConfig& c) { c.warmup_steps = 11; });
  refused([](LrScheduleConfig& c) { c.decay_steps = 7; });
}

}  // namespace
}  // namespace orlop

#include <tests/support.h>

#include <numbers>

#include <mica/optim/schedule.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

TEST(CosineSchedule, WarmsUpAndFalls) {
  const optim::CosineSchedule schedule{.peak = 1, .floor = 0.2, .warmup = 4, .total = 12};
  const std::vector<double> warmup{0.2, 0.4, 0.6, 0.8};
  for (int step = 0; step < 4; ++step) {
    EXPECT_DOUBLE_EQ(schedule.lr(step), warmup[step]);
  }
  EXPECT_DOUBLE_EQ(schedule.lr(4), 1);
  EXPECT_DOUBLE_EQ(schedule.lr(6), 0.2 + 0.8 * 0.5 * (1 + std::numbers::sqrt2 / 2));
  EXPECT_DOUBLE_EQ(schedule.lr(8), 0.6);
  EXPECT_DOUBLE_EQ(schedule.lr(12), 0.2);
  EXPECT_DOUBLE_EQ(schedule.lr(1000), 0.2);
}

TEST(CosineSchedule, EdgesAndErrors) {
  EXPECT_EQ((optim::CosineSchedule{.peak = 1, .floor = 0.5, .warmup = 0, .total = 0}.lr(0)), 0.5);
  EXPECT_EQ((optim::CosineSchedule{.peak = 1, .warmup = 0, .total = 1}.lr(0)), 1);
  expect_error([] { optim::CosineSchedule{.warmup = 5, .total = 4}.lr(0); }, "warmup 5 and total 4");
  expect_error([] { optim::CosineSchedule{.total = 4}.lr(-1); }, "expected step >= 0, got -1");
}

TEST(CosineSchedule, LargestStepCounts) {
  const std::int64_t most = INT64_MAX;
  const optim::CosineSchedule schedule{.peak = 1, .warmup = most, .total = most};
  EXPECT_DOUBLE_EQ(schedule.lr(0), 0x1p-63);
  EXPECT_DOUBLE_EQ(schedule.lr(most - 1), 1);
  EXPECT_DOUBLE_EQ(schedule.lr(most), 0);
}

TEST(CosineSchedule, Defaults) {
  const optim::CosineSchedule schedule;
  EXPECT_EQ(schedule.lr(0), 1e-3);  // no warm-up, and the fall ends with the first step
  EXPECT_EQ(schedule.lr(1), 0);
}

}  // namespace

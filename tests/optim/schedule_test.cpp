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
  EXPECT_EQ(schedule.lr(0), 1e-3);  // no warm-up, and the decay ends with the first step
  EXPECT_EQ(schedule.lr(1), 0);
}

TEST(LinearSchedule, WarmsUpAndFalls) {
  const optim::LinearSchedule schedule{.peak = 1, .floor = 0.2, .warmup = 4, .total = 12};
  const std::vector<double> expected{0.2, 0.4, 0.6, 0.8, 1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.2};
  for (std::size_t step = 0; step < expected.size(); ++step) {
    EXPECT_NEAR(schedule.lr(static_cast<std::int64_t>(step)), expected[step], 1e-15) << step;
  }
  expect_error([] { optim::LinearSchedule{.warmup = 5, .total = 4}.lr(0); }, "LinearSchedule: expected 0 <= warmup");
  expect_error([] { optim::LinearSchedule{.total = 4}.lr(-1); }, "LinearSchedule: expected step >= 0, got -1");
}

TEST(OneCycleSchedule, RisesAndFalls) {
  const optim::OneCycleSchedule schedule{.peak = 1, .total = 10, .rise = 0.5, .start_factor = 5, .end_factor = 4};
  EXPECT_DOUBLE_EQ(schedule.lr(0), 0.2);
  EXPECT_DOUBLE_EQ(schedule.lr(2), 0.6);
  EXPECT_DOUBLE_EQ(schedule.lr(4), 1);
  EXPECT_DOUBLE_EQ(schedule.lr(9), 0.05);
  EXPECT_DOUBLE_EQ(schedule.lr(1000), 0.05);
  // The peak is at step 0: a single step leaves no room for a rise.
  EXPECT_DOUBLE_EQ((optim::OneCycleSchedule{.peak = 1, .total = 4, .rise = 0.25}.lr(0)), 1);
  EXPECT_DOUBLE_EQ((optim::OneCycleSchedule{.peak = 1, .total = 1, .rise = 1, .start_factor = 2}.lr(0)), 0.5 / 1e4);
  expect_error([] { optim::OneCycleSchedule{.total = 0}.lr(0); }, "expected at least 1 step");
  expect_error([] { optim::OneCycleSchedule{.rise = 1.5}.lr(0); }, "expected a rise in [0, 1], got 1.5");
  expect_error([] { optim::OneCycleSchedule{.rise = NAN}.lr(0); }, "expected a rise in [0, 1], got nan");
  expect_error([] { optim::OneCycleSchedule{.end_factor = 0}.lr(0); }, "expected factors above 0, got 25 and 0");
  expect_error([] { optim::OneCycleSchedule{}.lr(-1); }, "expected step >= 0, got -1");
}

}  // namespace

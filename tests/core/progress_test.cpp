#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include <mica/core/progress.h>

using namespace mica;

namespace {

struct Seen {
  std::string task;
  std::int64_t done, total;
  bool finished;
};

TEST(Progress, ReportsToTheInnermostObserverAtALimitedRate) {
  std::vector<Seen> outer, inner;
  const auto into = [](std::vector<Seen>& seen) {
    return [&seen](const ProgressReport& report) {
      seen.push_back({report.task, report.done, report.total, report.finished});
    };
  };
  { ProgressTask unobserved("nobody", 3); }
  const ProgressObserver observer(into(outer));
  ProgressTask task("first", 1000);
  {
    const ProgressObserver other(into(inner));
    const ProgressTask nested("second", 0);
  }
  for (int i = 0; i < 1000; ++i) {
    task.advance();
  }
  EXPECT_LE(outer.size(), 2u);  // not one for each call
  std::this_thread::sleep_for(std::chrono::milliseconds(110));
  const std::size_t before = outer.size();
  task.advance(500);
  ASSERT_EQ(outer.size(), before + 1);
  EXPECT_EQ(outer.back().task, "first");
  EXPECT_EQ(outer.back().done, 1000);  // never more than the total
  EXPECT_FALSE(outer.back().finished);
  ASSERT_EQ(inner.size(), 1u);
  EXPECT_EQ(inner[0].task, "second");
  EXPECT_EQ(inner[0].done, 1);
  EXPECT_TRUE(inner[0].finished);
}

TEST(Progress, CountsTheWorkOfSeveralThreads) {
  std::vector<Seen> seen;
  {
    const ProgressObserver observer([&](const ProgressReport& report) {
      seen.push_back({report.task, report.done, report.total, report.finished});
    });
    ProgressTask task("parallel", 4000);
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        for (int i = 0; i < 1000; ++i) {
          task.advance();
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  }
  EXPECT_EQ(seen.back().done, 4000);
  EXPECT_TRUE(seen.back().finished);
}

TEST(Progress, EstimatesTheTimeLeft) {
  const std::string task = "x";
  const ProgressReport at_first{.task = task, .done = 0, .total = 10, .seconds = 3, .finished = false};
  EXPECT_FALSE(at_first.seconds_left());
  const ProgressReport later{.task = task, .done = 2, .total = 10, .seconds = 3, .finished = false};
  EXPECT_DOUBLE_EQ(later.seconds_left().value(), 12);
}

}  // namespace

#include <algorithm>
#include <atomic>
#include <numeric>
#include <vector>

#include "tests/support.h"
#include <mica/core/parallel.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

class Parallel : public testing::Test {
 protected:
  ~Parallel() override { set_num_threads(threads_); }
  int threads_ = num_threads();
};

TEST_F(Parallel, EveryIndexOnce) {
  for (const int threads : {1, 2, 3, 8}) {
    set_num_threads(threads);
    for (const std::int64_t n : {0, 1, 2, 7, 100, 1001}) {
      std::vector<int> hits(static_cast<std::size_t>(n), 0);
      parallel_for(n, 10, [&](std::int64_t begin, std::int64_t end) {
        EXPECT_LT(begin, end);
        for (std::int64_t i = begin; i < end; ++i) {
          ++hits[static_cast<std::size_t>(i)];
        }
      });
      EXPECT_EQ(std::accumulate(hits.begin(), hits.end(), 0), n);
      EXPECT_TRUE(std::all_of(hits.begin(), hits.end(), [](int h) { return h == 1; }));
    }
  }
}

TEST_F(Parallel, SmallWorkStaysOnOneThread) {
  set_num_threads(4);
  std::atomic<int> calls{0};
  parallel_for(100, 100, [&](std::int64_t, std::int64_t) { ++calls; });
  EXPECT_EQ(calls, 1);
}

TEST_F(Parallel, NestedRunsAsOneRange) {
  set_num_threads(2);
  std::atomic<int> calls{0};
  parallel_for(2, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      parallel_for(1000, 1, [&](std::int64_t, std::int64_t) { ++calls; });
    }
  });
  EXPECT_EQ(calls, 2);
}

TEST_F(Parallel, ExceptionsReachTheCaller) {
  set_num_threads(2);
  expect_error([] { parallel_for(100, 1, [](std::int64_t begin, std::int64_t) { check(begin == 0, "second half"); }); },
               "second half");
  int after = 0;
  parallel_for(1, 1, [&](std::int64_t, std::int64_t) { ++after; });
  EXPECT_EQ(after, 1);
}

TEST_F(Parallel, Errors) {
  expect_error([] { set_num_threads(0); }, "expected from 1 to 1024 threads, got 0");
  expect_error([] { set_num_threads(-1); }, "expected from 1 to 1024 threads, got -1");
  expect_error([] { set_num_threads(2'000'000'000); }, "expected from 1 to 1024 threads, got 2000000000");
  EXPECT_EQ(num_threads(), threads_);
  set_num_threads(kMaxThreads);
  EXPECT_EQ(num_threads(), kMaxThreads);
  expect_error([] { parallel_for(1, 1, nullptr); }, "parallel_for: expected a function to call, got an empty one");
}

TEST_F(Parallel, LongestRanges) {
  set_num_threads(3);
  std::atomic<std::int64_t> covered{0};
  const auto body = [&](std::int64_t begin, std::int64_t end) { covered += end - begin; };
  parallel_for(INT64_MAX, 1, body);
  EXPECT_EQ(covered, INT64_MAX);
  covered = 0;
  parallel_for(INT64_MAX, INT64_MAX - 1, body);
  EXPECT_EQ(covered, INT64_MAX);
}

}  // namespace

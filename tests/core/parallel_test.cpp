#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support.h"
#include <mica/core/parallel.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

/// The sum of i² for i < n. Sums of fixed blocks are added in order, so the bits do not depend on the threads.
double sum_of_squares(std::int64_t n) {
  constexpr std::int64_t kBlock = 64;
  std::vector<double> sums(static_cast<std::size_t>((n + kBlock - 1) / kBlock), 0.0);
  parallel_for(static_cast<std::int64_t>(sums.size()), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t block = begin; block < end; ++block) {
      for (std::int64_t i = block * kBlock; i < std::min(n, (block + 1) * kBlock); ++i) {
        sums[static_cast<std::size_t>(block)] += 1e-3 * static_cast<double>(i) * static_cast<double>(i);
      }
    }
  });
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

/// Calls f in a forked process, which is killed after 60 s, and returns its status.
template <class F>
int status_of_child(const F& f) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    _exit(f() ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return status;
}

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

TEST_F(Parallel, EveryExceptionIsCaughtAndOneRethrown) {
  set_num_threads(1);
  const double expected = sum_of_squares(1000);
  for (const int threads : {1, 2, 7}) {
    set_num_threads(threads);
    for (int i = 0; i < 20; ++i) {
      EXPECT_THROW(parallel_for(100, 1, [](std::int64_t, std::int64_t) { throw std::out_of_range("here"); }),
                   std::out_of_range);
    }
    EXPECT_EQ(sum_of_squares(1000), expected);
  }
}

TEST_F(Parallel, SameBitsWithEveryNumberOfThreads) {
  set_num_threads(1);
  const double expected = sum_of_squares(100'000);
  for (const int threads : {2, 3, 7, 2, 1, 16}) {
    set_num_threads(threads);
    for (int i = 0; i < 50; ++i) {
      ASSERT_EQ(sum_of_squares(100'000), expected) << threads;
    }
  }
}

TEST_F(Parallel, ConcurrentCallers) {
  set_num_threads(3);
  const double expected = sum_of_squares(10'000);
  std::array<int, 4> right{};
  std::vector<std::thread> callers;
  for (int& count : right) {
    callers.emplace_back([&count, expected] {
      for (int i = 0; i < 200; ++i) {
        count += sum_of_squares(10'000) == expected ? 1 : 0;
      }
    });
  }
  for (std::thread& caller : callers) {
    caller.join();
  }
  EXPECT_EQ(right, (std::array<int, 4>{200, 200, 200, 200}));
}

// While another thread has the pool, a caller runs its ranges alone.
TEST_F(Parallel, CallerInsideAnothersCall) {
  set_num_threads(2);
  const double expected = sum_of_squares(1000);
  double inner = 0;
  std::atomic<bool> once{true};
  parallel_for(8, 1, [&](std::int64_t, std::int64_t) {
    if (once.exchange(false)) {
      std::thread([&] { inner = sum_of_squares(1000); }).join();
    }
  });
  EXPECT_EQ(inner, expected);
}

#if !defined(MICA_THREAD_SANITIZER)  // It ends processes that start threads after fork().

// A child of fork() has none of its parent's other threads.
TEST_F(Parallel, ComputesAfterFork) {
  set_num_threads(3);
  const double expected = sum_of_squares(100'000);
  const auto computes = [expected] { return sum_of_squares(100'000) == expected; };
  EXPECT_EQ(status_of_child(computes), 0);
  EXPECT_EQ(status_of_child([&] { return computes() && status_of_child(computes) == 0; }), 0) << "a grandchild";
  EXPECT_EQ(status_of_child([&] {
              set_num_threads(2);
              return computes();
            }),
            0);
  EXPECT_TRUE(computes());
}

// Another thread may have the pool at that moment.
TEST_F(Parallel, ComputesAfterForkDuringACall) {
  set_num_threads(2);
  const double expected = sum_of_squares(10'000);
  std::atomic<bool> running{false}, forked{false};
  std::thread caller([&] {
    parallel_for(8, 1, [&](std::int64_t, std::int64_t) {
      running = true;
      while (!forked) {
        std::this_thread::yield();
      }
    });
  });
  while (!running) {
    std::this_thread::yield();
  }
  EXPECT_EQ(status_of_child([expected] { return sum_of_squares(10'000) == expected; }), 0);
  forked = true;
  caller.join();
}

// The threads end, and destructors of static objects compute after that.
TEST_F(Parallel, ComputesAtExit) {
  set_num_threads(3);
  static const double expected = sum_of_squares(1000);
  EXPECT_EQ(status_of_child([]() -> bool {
              static const struct Last {
                ~Last() { _exit(sum_of_squares(1000) == expected ? 7 : 8); }
              } last;
              sum_of_squares(1000);
              std::exit(1);
            }),
            7 << 8);
}

#endif

/// What this test prints in a new process with another environment, which is read once.
std::string output_with(const std::string& threads, const std::string& expected) {
  const std::string program = std::filesystem::read_symlink("/proc/self/exe");
  const std::string command = "env -u GTEST_TOTAL_SHARDS -u GTEST_SHARD_INDEX MICA_EXPECTED_THREADS=" + expected +
                              " OMP_NUM_THREADS='" + threads + "' timeout 60 '" + program +
                              "' --gtest_filter=Parallel.NumberFromTheEnvironment 2>&1";
  FILE* const pipe = popen(command.c_str(), "r");
  std::string output;
  std::array<char, 256> some{};
  while (pipe != nullptr && std::fgets(some.data(), some.size(), pipe) != nullptr) {
    output += some.data();
  }
  EXPECT_TRUE(pipe != nullptr && pclose(pipe) != -1);
  return output;
}

TEST_F(Parallel, NumberFromTheEnvironment) {
  if (const char* const expected = std::getenv("MICA_EXPECTED_THREADS"); expected != nullptr) {
    EXPECT_EQ(std::to_string(num_threads()), expected);
    return;
  }
  for (const auto& [threads, expected] : {std::pair("5", "5"), std::pair("3,2", "3"), std::pair("5000", "1024")}) {
    const std::string output = output_with(threads, expected);
    EXPECT_TRUE(output.find("1 passed, 0 failed") != std::string::npos) << output;
  }
  for (const std::string threads : {"0", "-1", "two", "2x", ",2", "99999999999"}) {
    const std::string output = output_with(threads, "1");
    EXPECT_TRUE(output.find("OMP_NUM_THREADS: expected a number of threads, got \"" + threads + '"') !=
                std::string::npos)
        << output;
  }
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

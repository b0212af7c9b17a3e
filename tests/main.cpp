#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>

#if defined(MICA_ADDRESS_SANITIZER)
// Tests that request more memory than there is expect mica's error, not the sanitizer's. Leaks are failures.
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1:detect_leaks=1"; }
#endif
#if defined(MICA_THREAD_SANITIZER)
// A test's child process may start threads, also if other tests started some before it was forked.
extern "C" const char* __tsan_default_options() { return "allocator_may_return_null=1:die_after_fork=0"; }
#endif

namespace {

std::string current;  // what the handler prints

/// Ends the program if a test takes MICA_TEST_SECONDS (default 900; 0: no limit), as one that hangs would.
class TimeLimit : public testing::EmptyTestEventListener {
 public:
  TimeLimit() {
    const char* const seconds = std::getenv("MICA_TEST_SECONDS");
    seconds_ = seconds != nullptr ? static_cast<unsigned>(std::atoi(seconds)) : 900;
    (void)std::signal(SIGALRM, [](int) {
      (void)!write(STDOUT_FILENO, current.data(), current.size());
      std::abort();
    });
  }

 private:
  void OnTestStart(const testing::TestInfo& test) override {
    current = std::string(test.test_suite_name()) + "." + test.name() + " does not end\n";
    alarm(seconds_);
  }
  void OnTestEnd(const testing::TestInfo& /*test*/) override { alarm(0); }

  unsigned seconds_;
};

}  // namespace

int main(int argc, char** argv) {
  setenv("MICA_POISON", "1", 0);  // fills uninitialized memory with NaN; MICA_POISON=0 disables this
  testing::InitGoogleTest(&argc, argv);
  testing::UnitTest::GetInstance()->listeners().Append(new TimeLimit);
  const int status = RUN_ALL_TESTS();
  if (!testing::GTEST_FLAG(list_tests)) {
    const testing::UnitTest& all = *testing::UnitTest::GetInstance();
    std::printf("%d passed, %d failed, %d skipped\n", all.successful_test_count(), all.failed_test_count(),
                all.skipped_test_count());
  }
  return status;
}

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

#if defined(MICA_ADDRESS_SANITIZER)
// Tests that request more memory than there is expect mica's error, not the sanitizer's. Leaks are failures.
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1:detect_leaks=1"; }
#endif
#if defined(MICA_THREAD_SANITIZER)
extern "C" const char* __tsan_default_options() { return "allocator_may_return_null=1"; }
#endif

int main(int argc, char** argv) {
  setenv("MICA_POISON", "1", 0);  // fills uninitialized memory with NaN; MICA_POISON=0 disables this
  testing::InitGoogleTest(&argc, argv);
  const int status = RUN_ALL_TESTS();
  if (!testing::GTEST_FLAG(list_tests)) {
    const testing::UnitTest& all = *testing::UnitTest::GetInstance();
    std::printf("%d passed, %d failed, %d skipped\n", all.successful_test_count(), all.failed_test_count(),
                all.skipped_test_count());
  }
  return status;
}

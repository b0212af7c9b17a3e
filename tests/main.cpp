#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

#include <mica/core/parallel.h>

#if defined(__SANITIZE_ADDRESS__)
// Tests ask for more memory than there is, and expect mica's error rather than the sanitizer's. What is left at the end
// is a failure.
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1:detect_leaks=1"; }
#endif

int main(int argc, char** argv) {
  setenv("MICA_POISON", "1", 0);  // what no kernel writes is to be NaN; MICA_POISON=0 keeps it off
#if defined(__SANITIZE_THREAD__)
  mica::set_num_threads(1);  // ThreadSanitizer does not see how libgomp's threads wait for each other
#endif
  testing::InitGoogleTest(&argc, argv);
  const int status = RUN_ALL_TESTS();
  if (!testing::GTEST_FLAG(list_tests)) {
    const testing::UnitTest& all = *testing::UnitTest::GetInstance();
    std::printf("%d passed, %d failed, %d skipped\n", all.successful_test_count(), all.failed_test_count(),
                all.skipped_test_count());
  }
  return status;
}

#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "tests/support.h"
#include <mica/core/copy.h>
#include <mica/core/cuda/detail/launch_record.h>
#include <mica/ops/matmul/matmul.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

using Names = std::vector<std::string>;

TEST(LaunchRecord, NotifiesEveryObserverOfItsThread) {
  cuda::LaunchObserver::notify("nobody listens");
  cuda::LaunchRecord outer;
  cuda::LaunchObserver::notify("first");
  {
    cuda::LaunchRecord inner;
    cuda::LaunchObserver::notify("second");
    EXPECT_EQ(inner.names(), Names{"second"});
    std::thread([] { cuda::LaunchObserver::notify("another thread's"); }).join();
  }
  cuda::LaunchObserver::notify("third");
  EXPECT_EQ(outer.names(), (Names{"first", "second", "third"}));
  EXPECT_TRUE(outer.has("second"));
  EXPECT_FALSE(outer.has("seco"));
  outer.clear();
  EXPECT_TRUE(outer.names().empty());
}

TEST(LaunchRecord, NamesKernelsAndLibraryCalls) {
  if (!cuda_available()) {
    GTEST_SKIP() << "no GPU";
  }
  const Tensor x = full({64, 64}, 1, float32, Device::cuda());
  cuda::LaunchRecord record;
  const Tensor y = empty({64, 64}, float16, x.device());
  EXPECT_TRUE(record.names().empty());
  copy_into(y, x);
  EXPECT_EQ(record.names(), Names{"copy"});
  record.clear();
  const Tensor product = matmul(x, x);
  EXPECT_EQ(record.names(), Names{"cublasGemmEx"});
}

TEST(LaunchRecord, IsEmptyOnTheCpu) {
  cuda::LaunchRecord record;
  const Tensor x = full({64, 64}, 1);
  const Tensor product = matmul(x, x);
  EXPECT_EQ(record.names(), Names{});
}

}  // namespace

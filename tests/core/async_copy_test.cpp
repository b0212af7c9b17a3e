#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <future>

#include "tests/support.h"
#include <mica/core/creation.h>
#include <mica/core/detail/async_copy.h>
#include <mica/ops/elementwise/binary.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

// A host tensor whose element i is i + first, for copies to the device.
Tensor numbers(std::int64_t count, int first, Device device) {
  const Tensor x = pinned_empty({count}, int32, device);
  for (std::int64_t i = 0; i < count; ++i) {
    x.data<std::int32_t>()[i] = static_cast<std::int32_t>(i) + first;
  }
  return x;
}

TEST(AsyncCopy, CopiesBothWays) {
  for (const Device device : test_devices()) {
    const CopyStream stream(device);
    const Tensor a = numbers(1000, 5, device), b = numbers(3, -1, device);
    const Tensor there_a = empty({1000}, int32, device), there_b = empty({3}, int32, device);
    stream.start({there_a, there_b}, {a, b}).order();
    const Tensor back = pinned_empty({1000}, int32, device);
    stream.start({back}, {there_a + there_a}).wait();
    for (std::int64_t i = 0; i < 1000; ++i) {
      ASSERT_EQ(back.data<std::int32_t>()[i], 2 * (i + 5));
    }
    EXPECT_EQ(to_vector<std::int32_t>(there_b), (std::vector<std::int32_t>{-1, 0, 1}));
  }
}

// Work that is launched after a copy, and does not use its result, ends while the copy is running.
TEST(AsyncCopy, RunsBesideLaterWork) {
  if (!cuda_available()) {
    GTEST_SKIP() << "there is no GPU";
  }
  const Device device = Device::cuda();
  const CopyStream stream(device);
  const Tensor from = numbers(std::int64_t{1} << 26, 0, device);  // 256 MiB, which take some 5 ms
  const Tensor to = empty(from.shape(), int32, device);
  const Tensor small = ones({8}, float32, device);
  EXPECT_EQ((small + small).to(Device::cpu()).data<float>()[7], 2);  // kernels are loaded at their first launch
  bool ended_first = false;
  // If this thread is delayed, the copy ends before it looks; not every time.
  for (int i = 0; i < 20 && !ended_first; ++i) {
    const AsyncCopy copy = stream.start({to}, {from});
    std::future<void> complete = std::async(std::launch::async, [&] { copy.wait(); });
    (void)(small + small).to(Device::cpu());
    ended_first = complete.wait_for(std::chrono::seconds(0)) == std::future_status::timeout;
    complete.get();
  }
  EXPECT_TRUE(ended_first);
  EXPECT_EQ(to_vector<std::int32_t>(to).back(), (1 << 26) - 1);
}

}  // namespace

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <thread>

#include "tests/support.h"
#include <mica/core/copy.h>
#include <mica/core/detail/memory.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

TEST(Memory, LargeBlocksAreReused) {
  if (!memory::pooling()) {
    GTEST_SKIP() << "pooling is off";
  }
  const void* first = empty({1 << 20}).raw_data();
  const Tensor again = empty({(1 << 20) - 1000});  // of the same size class
  EXPECT_EQ(again.raw_data(), first);
  const Tensor beside = empty({1 << 20});
  EXPECT_NE(beside.raw_data(), first);
}

TEST(Memory, BlocksAreKeptAgainAfterMemoryRanOut) {
  if (!memory::pooling()) {
    GTEST_SKIP() << "pooling is off";
  }
  {
    std::vector<Tensor> all;  // as much as is kept at most, up to less than 32 MiB
    for (const std::int64_t size : {256 << 20, 32 << 20}) {
      for (int i = 0; i < 8; ++i) {
        all.push_back(empty({size}, uint8));
      }
    }
  }
  EXPECT_THROW(empty({std::int64_t{1} << 50}, uint8), OutOfMemory);  // returns what is kept to the system
  // The block that was freed last is given out first. malloc, which keeps none of this size, would begin at the top.
  Tensor first = empty({64 << 20}, uint8);
  Tensor second = empty({64 << 20}, uint8);
  const void* const last_freed = second.raw_data();
  first = {};
  second = {};
  EXPECT_EQ(empty({64 << 20}, uint8).raw_data(), last_freed);
}

TEST(Memory, SmallBlocksAreReusedOnTheGpu) {
  if (!cuda_available() || !memory::pooling()) {
    GTEST_SKIP() << "no GPU, or pooling is off";
  }
  const Device gpu = Device::cuda();
  const void* first = empty({1000}, float32, gpu).raw_data();
  const Tensor again = empty({997}, float32, gpu);  // of the same size class
  EXPECT_EQ(again.raw_data(), first);
  const Tensor beside = full({1000}, 2, float32, gpu);
  EXPECT_NE(beside.raw_data(), first);
  fill_data(again, 1);
  expect_close(beside, std::vector<double>(1000, 2), 0, 0);
}

TEST(Memory, NewBlocksArePoisoned) {
  if (!memory::poisoning()) {
    GTEST_SKIP() << "MICA_POISON is off";
  }
  for (const Device device : test_devices()) {
    for (const std::int64_t size : {1, 100, 65536, 1 << 20}) {
      for (int round = 0; round < 3; ++round) {  // first a new block, later possibly the one just freed
        const Tensor x = empty({size}, uint8, device);
        const std::vector<std::uint8_t> values = to_vector<std::uint8_t>(x);
        EXPECT_EQ(std::count(values.begin(), values.end(), 0xFF), size) << to_string(device) << ", round " << round;
        fill_data(x, 1);
      }
      for (const DType dtype : {float16, bfloat16, float32, float64}) {
        const std::vector<double> values = to_vector<double>(empty({size}, dtype, device));
        EXPECT_EQ(std::count_if(values.begin(), values.end(), [](double value) { return std::isnan(value); }), size);
      }
    }
  }
}

TEST(Memory, EveryByteCanBeUsed) {
  // Sizes around the bounds of the size classes: a memory checker detects blocks that are too small.
  for (const std::int64_t base : {1, 64, 4096, 65536, 1 << 17, 147456, 1 << 20}) {
    for (const std::int64_t size : {base - 1, base, base + 1}) {
      for (const Device device : test_devices()) {
        const std::vector<std::uint8_t> values = to_vector<std::uint8_t>(full({size}, 1, uint8, device));
        EXPECT_EQ(std::count(values.begin(), values.end(), 1), size);
      }
    }
  }
}

TEST(Memory, BlocksFreedByAnotherThread) {
  for (int round = 0; round < 50; ++round) {
    Tensor made;
    std::thread([&] { made = ones({1 << 15}); }).join();
    const Tensor other = full({1 << 15}, 2);
    EXPECT_EQ(made.data<float>()[77], 1);
    std::thread([mine = std::move(made)]() mutable { mine = {}; }).join();
    EXPECT_EQ(other.data<float>()[77], 2);
  }
}

TEST(Memory, Aligned) {
  for (const std::int64_t size : {1, 3, 100, 100'000}) {
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(empty({size}).raw_data()) % 64, 0u);
  }
}

TEST(Memory, EachTensorOnItsOwnGpu) {
  if (cuda_device_count() < 2) {
    GTEST_SKIP() << "fewer than two GPUs";
  }
  const Tensor first = full({1000}, 1, float32, Device::cuda(0));
  const Tensor second = full({1000}, 2, float32, Device::cuda(1));
  EXPECT_EQ(second.device(), Device::cuda(1));
  expect_close(second, std::vector<double>(1000, 2), 0, 0);
  const Tensor moved = first.to(Device::cuda(1));
  add_into(second, moved);
  expect_close(second, std::vector<double>(1000, 3), 0, 0);
  expect_close(second.to(Device::cuda(0)), std::vector<double>(1000, 3), 0, 0);

  // With conversion and strides; freed blocks return to their own GPU.
  const auto turned = [](const Tensor& x) { return as_strided(x, {1000, 300}, {1, 1000}, 0); };
  for (int round = 0; round < 20; ++round) {
    const Tensor from = turned(full({300, 1000}, round, float32, Device::cuda(round % 2)));
    const Tensor to = turned(empty({300, 1000}, float16, Device::cuda(1 - round % 2)));
    copy_into(to, from);
    expect_close(to, std::vector<double>(300'000, round), 0, 0);
  }
}

TEST(Memory, StaticTensorsOutliveTheDriver) {
  if (!cuda_available()) {
    GTEST_SKIP() << "there is no GPU";
  }
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        static const Tensor kept = ones({4}, float32, Device::cuda());
        std::exit(0);
      },
      testing::ExitedWithCode(0), "");
}

}  // namespace

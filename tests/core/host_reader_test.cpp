#include <tests/support.h>

#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/detail/host_reader.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

using Values = std::vector<std::int64_t>;

TEST(HostReader, CopiesInTheirOrder) {
  for (const Device device : test_devices()) {
    HostReader reader(device, 3);
    const Tensor x = from_data<std::int64_t>({1, 2, 3}, {3}, device);
    reader.start(x);
    fill_data(x, 7);
    reader.start(x);
    EXPECT_EQ(reader.pending(), 2u);
    expect_error([&] { reader.start(x); }, "two copies are pending");
    EXPECT_EQ(reader.finish(), (Values{1, 2, 3}));
    fill_data(x, 9);
    reader.start(x);
    EXPECT_EQ(reader.finish(), (Values{7, 7, 7}));
    EXPECT_EQ(reader.finish(), (Values{9, 9, 9}));
    expect_error([&] { reader.finish(); }, "no copy is pending");
    expect_error([&] { reader.start(x.to(int32)); }, "expected 3 contiguous int64");
  }
}

TEST(HostReader, Slots) {
  HostReader on_host(Device::cpu(), 2);
  EXPECT_EQ(on_host.slots(), nullptr);
  expect_error([&] { on_host.start_slot(0); }, "expected a slot below 2 on CUDA");
  if (!cuda_available()) {
    return;
  }
  HostReader reader(Device::cuda(), 2);
  const Tensor x = from_data<std::int64_t>({1, 2}, {2}, Device::cuda());
  for (int i = 0; i < 3; ++i) {
    // Slots and copies can be mixed in any order.
    reader.start(x);
    reader.slots()[0] = 5;
    reader.slots()[1] = 6 + i;
    reader.start_slot(0);
    EXPECT_EQ(reader.finish(), (Values{1, 2}));
    reader.slots()[2] = -1;
    reader.slots()[3] = i;
    reader.start_slot(1);
    expect_error([&] { reader.start_slot(0); }, "two copies are pending");
    EXPECT_EQ(reader.finish(), (Values{5, 6 + i}));
    EXPECT_EQ(reader.finish(), (Values{-1, i}));
  }
  expect_error([&] { reader.start_slot(2); }, "expected a slot below 2 on CUDA");
  EXPECT_EQ(reader.pending(), 0u);
}

}  // namespace

#include <gtest/gtest.h>

#include "tests/support.h"
#include <mica/core/detail/allocation_fault.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

TEST(AllocationFault, FailsTheChosenAllocation) {
  memory::AllocationFault fault;
  EXPECT_EQ(fault.allocations(), 0);
  EXPECT_EQ(fault.outstanding(), 0);
  EXPECT_FALSE(fault.happened());  // no failure requested yet
  {
    const Tensor a = empty({3}), b = empty({1000});
    EXPECT_EQ(fault.allocations(), 2);
    EXPECT_EQ(fault.outstanding(), 2);
    EXPECT_FALSE(fault.happened());
  }
  EXPECT_EQ(fault.outstanding(), 0);

  fault.fail_after(1);
  EXPECT_FALSE(fault.happened());
  const Tensor first = empty({3});
  EXPECT_FALSE(fault.happened());
  expect_error([] { empty({5}); }, "out of memory: asked for 20 bytes; failure injected by a test");
  EXPECT_TRUE(fault.happened());
  EXPECT_EQ(fault.allocations(), 4);
  EXPECT_EQ(fault.outstanding(), 1);
  EXPECT_EQ(empty({5}).numel(), 5);  // the one after it succeeds
  EXPECT_EQ(fault.outstanding(), 1);
}

TEST(AllocationFault, EmptyTensorsAllocateNothing) {
  memory::AllocationFault fault;
  EXPECT_EQ(empty({0, 3}).numel(), 0);
  EXPECT_EQ(fault.allocations(), 0);
}

TEST(AllocationFault, OnlyOneMayBeActive) {
  {
    const memory::AllocationFault first;
    expect_error([] { memory::AllocationFault second; }, "AllocationFault: another one is active");
  }
  const memory::AllocationFault next;
  EXPECT_EQ(next.allocations(), 0);
}

}  // namespace

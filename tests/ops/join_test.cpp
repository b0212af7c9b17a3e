#include "tests/support.h"
#include <mica/autograd/gradcheck.h>
#include <mica/ops/join/join.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;
using autograd::gradcheck;

namespace join_test {

TEST(Join, Cat) {
  for (const Device device : test_devices()) {
    const Tensor a = from_data<float>({1, 2, 3, 4}, {2, 2}, device);
    const Tensor b = from_data<float>({5, 6}, {2, 1}, device);
    expect_close(cat({a, b}, -1), {1, 2, 5, 3, 4, 6}, 0, 0);
    expect_close(cat({a, transpose(a, 0, 1)}), {1, 2, 3, 4, 1, 3, 2, 4}, 0, 0);
    expect_close(cat({zeros({0, 2}, float32, device), a}), to_vector<double>(a), 0, 0);
  }
}

TEST(Join, Stack) {
  const Tensor a = from_data<float>({1, 2});
  const Tensor b = from_data<float>({3, 4});
  expect_close(stack({a, b}), {1, 2, 3, 4}, 0, 0);
  const Tensor columns = stack({a, b}, -1);
  EXPECT_EQ(columns.shape(), (Shape{2, 2}));
  expect_close(columns, {1, 3, 2, 4}, 0, 0);
}

TEST(Join, Gradients) {
  for (const Device device : test_devices()) {
    const Tensor a = randn({2, 3}, float64, device);
    const Tensor b = randn({2, 1}, float64, device);
    EXPECT_TRUE(gradcheck([](const Tensor& x, const Tensor& y) { return cat({x, y, x}, 1); }, {a, b}));
    EXPECT_TRUE(gradcheck([](const Tensor& x) { return stack({x, x}, 1); }, {a}));
  }
}

TEST(Join, Errors) {
  const Tensor a = zeros({2, 3});
  expect_error([&] { cat({}); }, "at least one tensor");
  expect_error([&] { cat({a, zeros({2})}); }, "expected shape [2, 3] except for axis 0, got [2] as tensor 1");
  expect_error([&] { cat({a, zeros({2, 4})}); }, "got [2, 4] as tensor 1");
  expect_error([&] { cat({a, zeros({2, 3}, float64)}); }, "expected float32 on cpu, got float64");
  const Tensor huge = expand(zeros({1}), {INT64_MAX});
  expect_error([&] { cat({huge, huge}); }, "cat: the sizes of axis 0 of 2 tensors add up to more than 63 bits");
  expect_error([&] { cat({huge, huge, zeros({3})}); }, "add up to more than 63 bits");
  expect_error([&] { cat({a}, 2); }, "cat: expected an axis in [-2, 2), got 2");
  expect_error([&] { stack({a, zeros({3})}); }, "stack: expected shape [2, 3], got [3]");
}

}  // namespace join_test

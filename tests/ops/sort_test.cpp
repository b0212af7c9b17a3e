#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "tests/support.h"
#include <mica/autograd/gradcheck.h>
#include <mica/core/creation.h>
#include <mica/core/parallel.h>
#include <mica/core/rng.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/sort/sort.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace sort_test {

using Values = std::vector<double>;

constexpr double kInf = std::numeric_limits<double>::infinity();

const std::vector<DType> kAll{float64, float32, float16, bfloat16, int64, int32, uint8, boolean};

// The indices of one row in sorted order, by the standard library's stable sort.
std::vector<std::int64_t> order_of(const double* row, std::int64_t n, bool descending) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  const auto less = [](double a, double b) { return std::isnan(b) ? !std::isnan(a) : a < b; };
  std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
    return descending ? less(row[b], row[a]) : less(row[a], row[b]);
  });
  return order;
}

void expect_sorted(const Tensor& x, bool descending) {
  const std::int64_t n = x.size(-1);
  const Values from = to_vector<double>(x);
  Values values, indices;
  for (std::size_t row = 0; row < from.size(); row += static_cast<std::size_t>(n)) {
    for (const std::int64_t i : order_of(from.data() + row, n, descending)) {
      values.push_back(from[row + static_cast<std::size_t>(i)]);
      indices.push_back(static_cast<double>(i));
    }
  }
  const auto [y, at] = sort(x, -1, descending);
  EXPECT_EQ(y.dtype(), x.dtype());
  EXPECT_EQ(at.dtype(), int64);
  expect_close(y, values, 0, 0);
  expect_close(at, indices, 0, 0);
  for (const std::int64_t k : {std::int64_t{1}, n / 2, n}) {
    const auto [top, top_at] = topk(x, k, -1, descending);
    expect_close(top, slice(y, -1, 0, k), 0, 0);
    expect_close(top_at, slice(at, -1, 0, k), 0, 0);
  }
}

TEST(Sort, AllDtypes) {
  manual_seed(1);
  for (const Device device : test_devices()) {
    for (const DType dtype : kAll) {
      for (const Shape& shape : {Shape{1, 1}, Shape{3, 7}, Shape{1, 300}, Shape{5, 1000}, Shape{700, 3}}) {
        const std::int64_t low = dtype == uint8 || dtype == boolean ? 0 : -50;
        const Tensor many_equal = randint(low, dtype == boolean ? 2 : 50, shape).to(dtype).to(device);
        for (const bool descending : {false, true}) {
          SCOPED_TRACE(fmt::format("{} {} {} {}", device, dtype, shape, descending));
          expect_sorted(many_equal, descending);
          if (is_floating(dtype)) {
            expect_sorted(randn(shape, dtype, device), descending);
          }
        }
      }
    }
  }
}

TEST(Sort, ExtremeValues) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, float16, bfloat16}) {
      const Values values{0, NAN, -kInf, 1, -0.0, kInf, -NAN, 6e-8, -6e-8, -1, 0, NAN, -0.0, kInf};
      const Tensor x = from_data(values, {2, 7}).to(dtype).to(device);
      expect_sorted(x, false);
      expect_sorted(x, true);
    }
    const std::int64_t least = INT64_MIN, most = INT64_MAX;
    const auto [y, at] = sort(from_data<std::int64_t>({most, 0, least, -1, most, least}, device));
    EXPECT_EQ(to_vector<std::int64_t>(y), (std::vector<std::int64_t>{least, least, -1, 0, most, most}));
    EXPECT_EQ(to_vector<std::int64_t>(at), (std::vector<std::int64_t>{2, 5, 3, 1, 0, 4}));
    const auto [z, where] = sort(from_data<std::int32_t>({INT32_MAX, INT32_MIN, 0}, device), 0, true);
    EXPECT_EQ(to_vector<std::int32_t>(z), (std::vector<std::int32_t>{INT32_MAX, 0, INT32_MIN}));
  }
}

TEST(Sort, AnyAxisAndStrides) {
  manual_seed(2);
  for (const Device device : test_devices()) {
    const Tensor x = randn({4, 5, 6}, float32, device);
    for (int axis = 0; axis < 3; ++axis) {
      const auto [y, at] = sort(x, axis);
      const auto [z, z_at] = sort(contiguous(transpose(x, axis, 2)), -1);
      expect_close(y, transpose(z, axis, 2), 0, 0);
      expect_close(at, transpose(z_at, axis, 2), 0, 0);
      expect_close(argsort(x, axis), at, 0, 0);
      expect_close(topk(transpose(x, 0, 2), 2, axis, false).values,
                   slice(sort(transpose(x, 0, 2), axis).values, axis, 0, 2), 0, 0);
    }
    EXPECT_EQ(sort(empty({3, 0}, float32, device)).indices.shape(), (Shape{3, 0}));
    EXPECT_EQ(sort(empty({0, 3}, float32, device)).values.shape(), (Shape{0, 3}));
    EXPECT_EQ(topk(x, 0).values.shape(), (Shape{4, 5, 0}));
  }
}

TEST(Sort, Gradients) {
  manual_seed(3);
  for (const Device device : test_devices()) {
    const Tensor x = reshape(arange(24, float64, device), {2, 12}) * 0.37;
    const Tensor mixed = sort(randn({2, 12}, float32, device)).indices;
    const Tensor shuffled = topk(x, 12, 1, false).values + mixed.to(float64) * 0.01;
    const auto sorted = [](const Tensor& t) { return sort(t * t, 0, true).values; };
    const auto top = [](const Tensor& t) { return topk(t * t, 5).values; };
    EXPECT_TRUE(autograd::gradcheck(sorted, {shuffled}));
    EXPECT_TRUE(autograd::gradgradcheck(sorted, {shuffled}));
    EXPECT_TRUE(autograd::gradcheck(top, {shuffled}));
    EXPECT_TRUE(autograd::gradgradcheck(top, {shuffled}));
    EXPECT_FALSE(sort(x.requires_grad_()).indices.requires_grad());
  }
}

TEST(Sort, Errors) {
  const Tensor x = ones({2, 3});
  expect_error([&] { sort(x, 2); }, "sort: ");
  expect_error([&] { argsort(x, -3); }, "argsort: ");
  expect_error([&] { sort(scalar(1)); }, "sort: ");
  expect_error([&] { topk(x, 4); }, "topk: expected k from 0 to 3, the length of the axis, got 4");
  expect_error([&] { topk(x, -1, 0); }, "topk: expected k from 0 to 2, the length of the axis, got -1");
}

}  // namespace sort_test

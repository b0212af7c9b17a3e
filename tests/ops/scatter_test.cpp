#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "tests/support.h"
#include <mica/autograd/gradcheck.h>
#include <mica/core/creation.h>
#include <mica/core/rng.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/index/scatter.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace scatter_test {

using Values = std::vector<double>;

constexpr ScatterReduction kReductions[] = {ScatterReduction::sum, ScatterReduction::prod, ScatterReduction::mean,
                                            ScatterReduction::amax, ScatterReduction::amin};

double reduce(ScatterReduction reduction, const Values& values) {
  double result = values[0];
  for (std::size_t i = 1; i < values.size(); ++i) {
    switch (reduction) {
      case ScatterReduction::sum:
      case ScatterReduction::mean: result += values[i]; break;
      case ScatterReduction::prod: result *= values[i]; break;
      case ScatterReduction::amax: result = std::max(result, values[i]); break;
      case ScatterReduction::amin: result = std::min(result, values[i]); break;
    }
  }
  return reduction == ScatterReduction::mean ? std::floor(result / static_cast<double>(values.size())) : result;
}

// Runs of one to many thousand elements, with whole numbers, so that all results are exact.
TEST(Scatter, ReducesLikeALoop) {
  manual_seed(1);
  for (const Device device : test_devices()) {
    for (const std::int64_t n : {0, 1, 40, 20000}) {
      for (const std::int64_t places : {1, 7, 3000}) {
        const Tensor index = randint(0, places, {n}, int64, device);
        for (const DType dtype : {float64, float32, int64, int32}) {
          const bool long_runs = n / places > 20;
          const Tensor x = randint(1, 3, {places}).to(device, dtype), src = randint(1, 3, {n}).to(device, dtype);
          const auto at = to_vector<std::int64_t>(index);
          const Values from = to_vector<double>(src), start = to_vector<double>(x);
          for (const ScatterReduction reduction : kReductions) {
            for (const bool include_self : {true, false}) {
              if ((long_runs && reduction == ScatterReduction::prod) ||
                  (is_floating(dtype) && reduction == ScatterReduction::mean)) {
                continue;
              }
              SCOPED_TRACE(
                  fmt::format("{} {} {} in {}, reduction {}", device, dtype, n, places, static_cast<int>(reduction)));
              std::vector<Values> lists(static_cast<std::size_t>(places));
              for (std::size_t i = 0; i < start.size(); ++i) {
                if (include_self) {
                  lists[i].push_back(start[i]);
                }
              }
              for (std::size_t i = 0; i < at.size(); ++i) {
                lists[static_cast<std::size_t>(at[i])].push_back(from[i]);
              }
              Values expected = start;
              for (std::size_t i = 0; i < start.size(); ++i) {
                expected[i] = lists[i].empty() ? start[i] : reduce(reduction, lists[i]);
              }
              expect_close(scatter_reduce(x, 0, index, src, reduction, include_self), expected, 0, 0);
            }
          }
        }
      }
    }
  }
}

TEST(Scatter, LastElementIsKept) {
  manual_seed(2);
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, bfloat16, int64, uint8, boolean}) {
      const Tensor index = from_data<std::int64_t>({2, 0, 2, 2}, device);
      const Tensor src = from_data({1.0, 1.0, 0.0, 1.0}).to(device, dtype);
      expect_close(scatter(zeros({4}, dtype, device), 0, index, src), Values{1, 0, 1, 0}, 0, 0);
    }
    const Tensor index = randint(0, 100, {30000}, int64, device);
    const Tensor order = arange(30000, int64, device);
    const auto last = to_vector<std::int64_t>(scatter(full({100}, -1, int64, device), 0, index, order));
    const auto at = to_vector<std::int64_t>(index);
    std::vector<std::int64_t> expected(100, -1);
    for (std::size_t i = 0; i < at.size(); ++i) {
      expected[static_cast<std::size_t>(at[i])] = static_cast<std::int64_t>(i);
    }
    EXPECT_EQ(last, expected);
    const Tensor x = ones({3}, float64, device).requires_grad_(), src = ones({3}, float64, device).requires_grad_();
    scatter(x, 0, from_data<std::int64_t>({1, 1, 2}, device), src).backward(from_data({1.0, 2.0, 3.0}, device));
    expect_close(x.grad(), Values{1, 0, 0}, 0, 0);
    expect_close(src.grad(), Values{0, 2, 3}, 0, 0);
    expect_close(scatter(zeros({3}, float32, device), 0, from_data<std::int64_t>({1}, device), 5.0), Values{0, 5, 0}, 0,
                 0);
  }
}

TEST(Scatter, Gradients) {
  manual_seed(3);
  for (const Device device : test_devices()) {
    const Tensor x = randn({4, 3, 2}, float64, device), src = randn({3, 5, 2}, float64, device);
    const Tensor index = randint(0, 3, {3, 4, 2}, int64, device);  // shorter than x and src
    for (const ScatterReduction reduction : kReductions) {
      for (const bool include_self : {true, false}) {
        SCOPED_TRACE(fmt::format("{}, reduction {}", device, static_cast<int>(reduction)));
        const auto f = [&](const Tensor& a, const Tensor& b) {
          return scatter_reduce(a, 1, index, b, reduction, include_self);
        };
        EXPECT_TRUE(autograd::gradcheck(f, {x, src}));
        EXPECT_TRUE(autograd::gradgradcheck(f, {x, src}));
      }
    }
    const auto replace = [&](const Tensor& a, const Tensor& b) { return scatter(a, 1, index, b) * a; };
    EXPECT_TRUE(autograd::gradcheck(replace, {x, src}));
    EXPECT_TRUE(autograd::gradgradcheck(replace, {x, src}));
    const Tensor slices = from_data<std::int64_t>({0, 2, 0}, device), rows = randn({4, 3, 2}, float64, device);
    const auto of_slices = [&](const Tensor& a, const Tensor& b) {
      return index_reduce(a, 1, slices, b, ScatterReduction::prod);
    };
    EXPECT_TRUE(autograd::gradgradcheck(of_slices, {x, rows}));
  }
}

TEST(Scatter, ZerosTiesAndNan) {
  for (const Device device : test_devices()) {
    const Tensor index = from_data<std::int64_t>({0, 0, 1, 1, 2, 2}, device);
    // One factor of 0, two of them, and none.
    const Tensor x = from_data({2.0, 3.0, 5.0}, device).requires_grad_();
    const Tensor src = from_data({0.0, 4.0, 0.0, 0.0, 3.0, 2.0}, device).requires_grad_();
    const Tensor y = scatter_reduce(x, 0, index, src, ScatterReduction::prod);
    y.backward(ones_like(y));
    expect_close(x.grad(), Values{0, 0, 6}, 0, 0);
    expect_close(src.grad(), Values{8, 0, 0, 0, 10, 15}, 0, 0);
    // Three equal elements share the gradient; NaN wins.
    const Tensor a = from_data({1.0, 0.0, 7.0}, device).requires_grad_();
    const Tensor b = from_data({1.0, 1.0, NAN, 2.0, 3.0, 9.0}, device).requires_grad_();
    const Tensor most = scatter_reduce(a, 0, index, b, ScatterReduction::amax);
    expect_close(most, Values{1, NAN, 9}, 0, 0);
    most.backward(from_data({3.0, 1.0, 1.0}, device));
    expect_close(a.grad(), Values{1, 0, 0}, 0, 0);
    expect_close(b.grad(), Values{1, 1, 1, 0, 0, 1}, 0, 0);
    expect_close(scatter_reduce(a.detach(), 0, index, b.detach(), ScatterReduction::amin), Values{1, NAN, 3}, 0, 0);
    // Products of 16-bit floats are rounded once.
    const Tensor factors = full({6}, 1.0078125, bfloat16, device);
    expect_close(
        scatter_reduce(ones({1}, bfloat16, device), 0, zeros({6}, int64, device), factors, ScatterReduction::prod),
        full({1}, std::pow(1.0078125, 6), float64).to(bfloat16), 0, 0);
  }
}

TEST(Scatter, IndicesOutOfRangeAndOtherErrors) {
  for (const Device device : test_devices()) {
    const Tensor x = ones({2, 3}, float32, device), src = full({2, 3}, 2, float32, device);
    const Tensor bad = from_data<std::int64_t>({0, 5, 1, 1, -1, 2}, {2, 3}, device);
    if (device.is_cpu()) {
      expect_error([&] { scatter(x, 1, bad, src); }, "scatter: index 5 is out of range");
      expect_error([&] { scatter_reduce(x, 1, bad, src, ScatterReduction::amax); }, "scatter_reduce: index 5");
    } else {
      expect_close(scatter(x, 1, bad, src), Values{2, 2, 1, 1, 2, 2}, 0, 0);
      expect_close(scatter_reduce(x, 1, bad, src, ScatterReduction::prod), Values{2, 2, 1, 1, 2, 2}, 0, 0);
    }
    const Tensor index = zeros({2, 3}, int64, device);
    expect_error([&] { scatter(x, 1, index, src.to(float64)); }, "scatter: expected src of float32");
    expect_error([&] { scatter(x, 1, index.to(float32), src); }, "scatter: expected an index of int64");
    expect_error([&] { scatter(x, 1, index, slice(src, 1, 0, 2)); }, "scatter: expected an index no longer than src");
    expect_error([&] { scatter_reduce(x.to(boolean), 1, index, src.to(boolean), ScatterReduction::amax); }, "bool");
    expect_error([&] { index_reduce(x, 1, index, src, ScatterReduction::amax); }, "index_reduce: expected an index of");
    expect_error([&] { index_reduce(x, 0, zeros({1}, int64, device), src, ScatterReduction::amax); },
                 "index_reduce: expected src of shape [1, 3]");
  }
}

}  // namespace scatter_test

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "tests/support.h"
#include <mica/autograd/gradcheck.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/parallel.h>
#include <mica/ops/softmax/softmax.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Calls f(first, step, n) for every line of elements along the axis.
template <class F>
void for_lines(const Shape& shape, int axis, F f) {
  std::int64_t inner = 1, outer = 1;
  for (int i = 0; i < shape.size(); ++i) {
    (i < axis ? outer : inner) *= i == axis ? 1 : shape[i];
  }
  for (std::int64_t o = 0; o < outer; ++o) {
    for (std::int64_t i = 0; i < inner; ++i) {
      f(o * shape[axis] * inner + i, inner, shape[axis]);
    }
  }
}

std::vector<double> reference(const Tensor& x, int axis, bool log) {
  std::vector<double> y = to_vector<double>(x);
  for_lines(x.shape(), axis, [&](std::int64_t first, std::int64_t step, std::int64_t n) {
    double largest = -kInf, sum = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      largest = std::max(largest, y[first + i * step]);
    }
    for (std::int64_t i = 0; i < n; ++i) {
      sum += std::exp(y[first + i * step] - largest);
    }
    for (std::int64_t i = 0; i < n; ++i) {
      const double centered = y[first + i * step] - largest;
      y[first + i * step] = log ? centered - std::log(sum) : std::exp(centered) / sum;
    }
  });
  return y;
}

std::vector<double> reference_backward(const Tensor& x, const Tensor& dy, int axis, bool log) {
  const std::vector<double> p = reference(x, axis, false);
  const std::vector<double> g = to_vector<double>(dy);
  std::vector<double> dx(g.size());
  for_lines(x.shape(), axis, [&](std::int64_t first, std::int64_t step, std::int64_t n) {
    double sum = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t at = first + i * step;
      sum += log ? g[at] : g[at] * p[at];
    }
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t at = first + i * step;
      dx[at] = log ? g[at] - p[at] * sum : p[at] * (g[at] - sum);
    }
  });
  return dx;
}

const std::vector<Shape> kShapes{{1},       {7},        {1, 1},       {5, 33},       {3, 64},      {2, 65},
                                 {4, 1000}, {3, 1025},  {2, 5000},    {1, 30'001},   {2, 100'000}, {300, 3},
                                 {4, 6, 5}, {3, 70, 9}, {2, 3, 4, 5}, {2, 600, 130}, {3, 2000, 2}, {0},
                                 {0, 4},    {4, 0},     {2, 0, 3}};

Tensor apply(const Tensor& x, int axis, bool log) { return log ? log_softmax(x, axis) : softmax(x, axis); }

TEST(Softmax, MatchesReference) {
  for (const Device device : test_devices()) {
    for (const Shape& shape : kShapes) {
      for (const DType dtype : {float32, float64, float16, bfloat16}) {
        const double tolerance = dtype == float64 ? 1e-13 : dtype == float32 ? 1e-5 : 2e-2;
        const Tensor base = randn(shape, dtype);
        const Tensor x = base.to(device);
        const Tensor dy = randn(shape, dtype).to(device);
        for (int axis = 0; axis < x.dim(); ++axis) {
          for (const bool log : {false, true}) {
            const std::string what = to_string(shape) + " axis " + std::to_string(axis) + " " +
                                     std::string(name_of(dtype)) + (log ? " log on " : " on ") + to_string(device);
            const Tensor leaf = x.detach().requires_grad_();
            const Tensor y = apply(leaf, axis, log);
            expect_close(y, reference(x, axis, log), tolerance, dtype == float64 ? 1e-14 : 1e-6, what);
            y.backward(dy);
            expect_close(leaf.grad(), reference_backward(x, dy, axis, log), 2 * tolerance,
                         dtype == float64   ? 1e-12
                         : dtype == float32 ? 1e-5
                                            : 3e-2,
                         what);
          }
        }
      }
    }
  }
}

// Rows whose lengths are multiples of 16 bytes have kernels of their own, by length; a view that begins between those
// has others. Each length is the longest or the shortest of a kernel, and the rows are not a whole number of blocks.
TEST(Softmax, EachKernel) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float32, float16, bfloat16}) {
      for (const std::int64_t n : {8, 64, 72, 128, 136, 256, 264, 512, 520, 768, 776, 1024, 1032, 3080, 4096, 12'288,
                                   12'296, 16'384, 16'392}) {
        const std::int64_t rows = n < 1000 ? 37 : 3;
        const Tensor memory = randn({rows * n + 1}, dtype).to(device);
        const Tensor gradients = randn({rows * n + 1}, dtype).to(device);
        for (const std::int64_t offset : {0, 1}) {
          for (const bool log : {false, true}) {
            const std::string what =
                fmt::format("{} rows of {} {} from {}{} on {}", rows, n, dtype, offset, log ? ", log" : "", device);
            const double tolerance = dtype == float32 ? 1e-5 : 2e-2;
            const Tensor x = as_strided(memory, {rows, n}, {n, 1}, offset).detach().requires_grad_();
            const Tensor dy = as_strided(gradients, {rows, n}, {n, 1}, offset);
            const Tensor y = apply(x, 1, log);
            expect_close(y, reference(x, 1, log), tolerance, 1e-6, what);
            y.backward(dy);
            expect_close(x.grad(), reference_backward(x, dy, 1, log), 2 * tolerance, dtype == float32 ? 1e-5 : 3e-2,
                         what);
          }
        }
      }
    }
  }
}

TEST(Softmax, ExtremeLogits) {
  for (const Device device : test_devices()) {
    for (const std::int64_t n : {3, 500, 5000, 50'000}) {
      std::vector<float> values(2 * n, -1e4f);
      values[1] = 1e4f;
      std::fill(values.begin() + n, values.end(), 1e4f);
      const Tensor x = from_data(values, {2, n}, device);
      expect_close(softmax(x, 1), reference(x, 1, false), 1e-6, 0);
      expect_close(log_softmax(x, 1), reference(x, 1, true), 1e-6, 2e-6);
      const Tensor columns = contiguous_data(transpose(x, 0, 1));
      expect_close(softmax(columns, 0), reference(columns, 0, false), 1e-6, 0);
      expect_close(log_softmax(columns, 0), reference(columns, 0, true), 1e-6, 2e-6);
    }
  }
}

TEST(Softmax, MaskedElements) {
  for (const Device device : test_devices()) {
    for (const std::int64_t n : {4, 500, 5000, 50'000}) {
      // Row 0: only two elements are left. Row 1: none is. Row 2: a NaN.
      std::vector<float> values(3 * n, static_cast<float>(-kInf));
      values[1] = 2;
      values[n - 1] = 2;
      values[3 * n - 2] = static_cast<float>(kNaN);
      std::vector<double> expected(3 * n, kNaN);
      std::fill(expected.begin(), expected.begin() + n, 0);
      expected[1] = expected[n - 1] = 0.5;
      const Tensor x = from_data(values, {3, n}, device);
      expect_close(softmax(x, -1), expected, 1e-6, 0);
      const Tensor columns = contiguous_data(transpose(x, 0, 1));
      expect_close(contiguous_data(transpose(softmax(columns, 0), 0, 1)), expected, 1e-6, 0);

      for (std::int64_t i = 0; i < n; ++i) {
        expected[i] = std::log(expected[i]);
      }
      expect_close(log_softmax(x, -1), expected, 1e-6, 0);

      // No gradient reaches what is masked, and none is NaN.
      const Tensor row = select(x, 0, 0).detach().requires_grad_();
      softmax(row, 0).backward(randn({n}, float32, device));
      for (const float g : to_vector<float>(row.grad())) {
        ASSERT_TRUE(std::isfinite(g));
      }
      EXPECT_EQ(to_vector<float>(row.grad())[0], 0);
    }
  }
}

TEST(Softmax, Gradients) {
  for (const Device device : test_devices()) {
    const Tensor x = randn({3, 4, 5}, float64, device);
    for (const int axis : {0, 1, -1}) {
      EXPECT_TRUE(autograd::gradcheck([axis](const Tensor& a) { return softmax(a, axis); }, {x}));
      EXPECT_TRUE(autograd::gradcheck([axis](const Tensor& a) { return log_softmax(a, axis); }, {x}));
    }
  }
}

TEST(Softmax, NonContiguousInput) {
  for (const Device device : test_devices()) {
    const Tensor x = transpose(randn({40, 30}, float32, device), 0, 1);
    expect_close(softmax(x, 1), reference(x, 1, false), 1e-6, 1e-7);
    expect_close(softmax(x, 0), reference(x, 0, false), 1e-6, 1e-7);
    const Tensor off = slice(randn({1001}, float32, device), 0, 1, 1001);
    expect_close(softmax(off, 0), reference(off, 0, false), 1e-5, 1e-8);
  }
}

TEST(Softmax, ThreadCountDoesNotShow) {
  const int before = num_threads();
  for (const Shape& shape : kShapes) {
    const Tensor x = randn(shape);
    const Tensor dy = randn(shape);
    for (const int axis : {0, x.dim() - 1}) {
      std::vector<std::vector<float>> results;
      for (const int threads : {1, 2, 2}) {
        set_num_threads(threads);
        const Tensor leaf = x.detach().requires_grad_();
        const Tensor y = softmax(leaf, axis);
        y.backward(dy);
        results.push_back(to_vector<float>(y));
        results.push_back(to_vector<float>(leaf.grad()));
      }
      EXPECT_TRUE(results[0] == results[2] && results[0] == results[4]) << to_string(shape);
      EXPECT_TRUE(results[1] == results[3] && results[1] == results[5]) << to_string(shape);
    }
  }
  set_num_threads(before);
}

TEST(Softmax, RowDoesNotDependOnItsNeighbors) {
  for (const Device device : test_devices()) {
    for (const std::int64_t n : {5, 33, 1000, 5001, 40'001}) {
      const Tensor row = randn({1, n}, float32, device);
      const Tensor many = contiguous_data(broadcast_view(row, {9, n}));
      const std::vector<float> alone = to_vector<float>(softmax(row, 1));
      const std::vector<float> together = to_vector<float>(softmax(many, 1));
      for (int i = 0; i < 9; ++i) {
        EXPECT_TRUE(std::equal(alone.begin(), alone.end(), together.begin() + i * n)) << n;
      }
    }
  }
}

TEST(Softmax, Errors) {
  expect_error([] { softmax(zeros({2, 3}), 2); }, "softmax: expected an axis in [-2, 2), got 2");
  expect_error([] { log_softmax(zeros({2, 3}), -3); }, "log_softmax: expected an axis in [-2, 2), got -3");
  expect_error([] { softmax(zeros({2}, int64), 0); }, "softmax: expected a floating dtype, got int64");
  expect_error([] { softmax(zeros({}), 0); }, "softmax");
}

}  // namespace

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <tuple>

#include "tests/depth.h"
#include "tests/launches.h"
#include "tests/rows_close.h"
#include "tests/support.h"
#include <mica/autograd/gradcheck.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/parallel.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/softmax/detail/softmax_plan.h>
#include <mica/ops/softmax/softmax.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;
using mica::kernels::kSoftmaxLayouts;
using mica::kernels::plan_softmax;

namespace softmax_test {

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

/// A gradient, and the size of each element's terms, to which rounding errors are proportional.
struct Gradient {
  std::vector<double> values, scales;
};

Gradient reference_backward(const Tensor& x, const Tensor& dy, int axis, bool log) {
  const std::vector<double> p = reference(x, axis, false);
  const std::vector<double> g = to_vector<double>(dy);
  Gradient dx{std::vector<double>(g.size()), std::vector<double>(g.size())};
  const double smallest = x.dtype() == float16 ? 0x1p-14 : 0;  // for smaller p, the spacing of float16 is constant
  for_lines(x.shape(), axis, [&](std::int64_t first, std::int64_t step, std::int64_t n) {
    double sum = 0, size = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t at = first + i * step;
      const double term = log ? g[at] : g[at] * p[at];
      sum += term;
      size += std::abs(term);
    }
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t at = first + i * step;
      dx.values[at] = log ? g[at] - p[at] * sum : p[at] * (g[at] - sum);
      // For log_softmax, p is computed from its rounded logarithm. For softmax, a relative rounding error u of p[at]
      // adds u · p[at] · (g[at] − sum), and rounding all of p adds at most u · size to the sum.
      dx.scales[at] = log ? std::abs(g[at]) + p[at] * (1 - std::log(p[at])) * size
                          : std::max(p[at], smallest) * (std::abs(g[at] - sum) + size);
    }
  });
  return dx;
}

void expect_forward(const Tensor& y, const Tensor& x, int axis, bool log, const std::string& what) {
  const std::vector<double> expected = reference(x, axis, log);
  std::vector<double> scales(expected.size());
  for (std::size_t i = 0; i < scales.size(); ++i) {
    scales[i] = std::abs(expected[i]) + (log ? 1 : 0);
  }
  // In 16 bits, there is the error of a fast exp in addition to the rounding of the result.
  expect_rows_close(y, expected, scales, 1, y.dtype() == float64 ? 1e-13 : y.dtype() == float32 ? 1e-5 : 1e-4, what);
}

void expect_backward(const Tensor& dx, const Tensor& x, const Tensor& dy, int axis, bool log, const std::string& what) {
  const Gradient expected = reference_backward(x, dy, axis, log);
  // In 16 bits, y is rounded before backward uses it, and there is the error of a fast exp.
  const double tolerance = dx.dtype() == float64   ? 1e-12
                           : dx.dtype() == float32 ? 1e-5
                                                   : 0.6 * epsilon_of(dx.dtype()) + 1e-4;
  expect_rows_close(dx, expected.values, expected.scales, 1, tolerance, what + " gradient");
}

/// Gradients whose row sums are far from 0, to detect a kernel that omits the sum.
Tensor random_gradient(const Shape& shape, DType dtype, Device device) {
  return (randn(shape, float64) + 1).to(dtype).to(device);
}

const std::vector<Shape> kShapes{{1},       {7},        {1, 1},       {5, 33},       {3, 64},      {2, 65},
                                 {4, 1000}, {3, 1025},  {2, 5000},    {1, 30'001},   {2, 100'000}, {300, 3},
                                 {4, 6, 5}, {3, 70, 9}, {2, 3, 4, 5}, {2, 600, 130}, {3, 2000, 2}, {0},
                                 {0, 4},    {4, 0},     {2, 0, 3}};

Tensor apply(const Tensor& x, int axis, bool log) { return log ? log_softmax(x, axis) : softmax(x, axis); }

TEST(Softmax, MatchesReference) {
  OneIn three(3);
  for (const Device device : test_devices()) {
    for (const Shape& shape : kShapes) {
      for (const DType dtype : {float32, float64, float16, bfloat16}) {
        const Tensor base = randn(shape, dtype);
        const Tensor x = base.to(device);
        const Tensor dy = random_gradient(shape, dtype, device);
        for (int axis = 0; axis < x.dim(); ++axis) {
          for (const bool log : {false, true}) {
            if (three.skips()) {
              continue;
            }
            const std::string what = to_string(shape) + " axis " + std::to_string(axis) + " " +
                                     std::string(name_of(dtype)) + (log ? " log on " : " on ") + to_string(device);
            const Tensor leaf = x.detach().requires_grad_();
            const Tensor y = apply(leaf, axis, log);
            expect_forward(y, x, axis, log, what);
            y.backward(dy);
            expect_backward(leaf.grad(), x, dy, axis, log, what);
          }
        }
      }
    }
  }
}

/// The kernel that is chosen for a row of n elements, if x and dy begin `offset` elements after a multiple of 16 bytes.
std::string kernel_of(std::int64_t n, DType dtype, std::int64_t offset, bool backward) {
  const int size = static_cast<int>(size_of(dtype));
  const std::string op = backward ? "softmax_backward_" : "softmax_";
  const int layout = plan_softmax({.columns = n,
                                   .element_size = size,
                                   .alignment = offset == 0 ? 16 : size,
                                   .clusters = gpu_has_clusters(),
                                   .backward = backward})
                         .layout;
  return op + (layout < 0 ? "looped" : kSoftmaxLayouts[layout].streamed ? "streamed" : "registers");
}

// Each length is the longest or the shortest for a kernel. The number of rows is not a multiple of a block's rows.
TEST(Softmax, EachKernel) {
  OneIn three(3);
  for (const Device device : test_devices()) {
    for (const DType dtype : {float32, float16, bfloat16, float64}) {
      for (const std::int64_t n :
           {8,      64,     65,     128,    136,    257,    268,    320,     328,     384,     512,    513,
            768,    769,    776,    1024,   1025,   1032,   3080,   4096,    8200,    12'288,  12'296, 16'384,
            16'391, 16'392, 24'576, 32'768, 32'776, 40'001, 65'536, 131'072, 196'616, 262'152, 300'001}) {
        const std::int64_t rows = n < 1000 ? 37 : n < 20'000 ? 3 : 2;
        if (device.is_cpu() && n > 1024) {
          continue;  // the CPU has a single kernel
        }
        const Tensor memory = randn({rows * n + 1}, dtype).to(device);
        const Tensor gradients = random_gradient({rows * n + 1}, dtype, device);
        for (const std::int64_t offset : {0, 1}) {
          for (const bool log : {false, true}) {
            if (three.skips()) {
              continue;
            }
            const std::string what =
                fmt::format("{} rows of {} {} from {}{} on {}", rows, n, dtype, offset, log ? ", log" : "", device);
            const Tensor x = as_strided(memory, {rows, n}, {n, 1}, offset).detach().requires_grad_();
            const Tensor dy = as_strided(gradients, {rows, n}, {n, 1}, offset);
            const cuda::LaunchRecord record;
            const Tensor y = apply(x, 1, log);
            y.backward(dy);
            expect_launched(record, device,
                            {kernel_of(n, dtype, offset, false).c_str(), kernel_of(n, dtype, offset, true).c_str()},
                            what);
            expect_forward(y, x, 1, log, what);
            expect_backward(x.grad(), x, dy, 1, log, what);
          }
        }
      }
    }
  }
}

// A cluster processes several rows one after another, an even or an odd number of them. The CPU has no clusters.
TEST(Softmax, MoreRowsThanClusters) {
  if (!gpu_has_clusters()) {
    GTEST_SKIP() << "needs a GPU with clusters";
  }
  for (const auto& [dtype, n, rows] :
       {std::tuple(float32, 32'776, 300), std::tuple(float32, 140'000, 40), std::tuple(bfloat16, 65'536, 155),
        std::tuple(float16, 131'072, 80), std::tuple(bfloat16, 64'512, 80)}) {
    std::vector<float> centers(rows);  // differ, so that the maximum or the sum of another row would be noticed
    for (int i = 0; i < rows; ++i) {
      centers[i] = static_cast<float>(i % 7);
    }
    const Tensor x = (randn({rows, n}) + from_data(centers, {rows, 1})).to(dtype).to(Device::cuda());
    for (const bool log : {false, true}) {
      const std::string what = fmt::format("{} rows of {} {}{}", rows, n, dtype, log ? ", log" : "");
      const cuda::LaunchRecord record;
      const Tensor y = apply(x, 1, log);
      expect_launched(record, x.device(), {"softmax_streamed"}, what);
      expect_forward(y, x, 1, log, what);
      EXPECT_TRUE(to_vector<float>(apply(x, 1, log)) == to_vector<float>(y)) << what << ": other bits in a second run";
    }
  }
}

TEST(Softmax, OtherAxes) {
  for (const Device device : test_devices()) {
    const cuda::LaunchRecord record;
    const Tensor x = randn({3, 50, 9}, float32, device).requires_grad_();
    const Tensor dy = random_gradient({3, 50, 9}, float32, device);
    for (const bool log : {false, true}) {
      x.set_grad({});
      const Tensor y = apply(x, 1, log);
      y.backward(dy);
      expect_forward(y, x, 1, log, "columns");
      expect_backward(x.grad(), x, dy, 1, log, "columns");
    }
    expect_launched(record, device, {"softmax_columns", "softmax_backward_columns"});
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
      // Row 0: two unmasked elements. Row 1: none. Row 2: a NaN.
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

      // Masked elements get no gradient, and no gradient is NaN.
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
    expect_forward(softmax(x, 1), x, 1, false, "rows");
    expect_forward(softmax(x, 0), x, 0, false, "columns");
    const Tensor off = slice(randn({1001}, float32, device), 0, 1, 1001);
    expect_forward(softmax(off, 0), off, 0, false, "unaligned");
  }
}

TEST(Softmax, SameBitsForAnyNumberOfThreads) {
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
    for (const DType dtype : {float32, bfloat16}) {
      for (const std::int64_t n : {5, 33, 1000, 5001, 40'001, 100'000}) {
        // A row's address does not matter, either: rows of odd length begin at different offsets from a multiple of 16
        // bytes.
        const Tensor row = randn({1, n}, dtype, device);
        const Tensor gradient = randn({1, n}, dtype, device);
        const auto results = [&](std::int64_t rows) {
          const Tensor x = contiguous_data(broadcast_view(row, {rows, n})).requires_grad_();
          const Tensor y = softmax(x, 1);
          y.backward(contiguous_data(broadcast_view(gradient, {rows, n})));
          return std::pair{to_vector<float>(y), to_vector<float>(x.grad())};
        };
        const auto [y, dx] = results(1);
        const auto [ys, dxs] = results(9);
        for (int i = 0; i < 9; ++i) {
          EXPECT_TRUE(std::equal(y.begin(), y.end(), ys.begin() + i * n)) << n << " " << name_of(dtype) << " row " << i;
          EXPECT_TRUE(std::equal(dx.begin(), dx.end(), dxs.begin() + i * n))
              << n << " " << name_of(dtype) << " row " << i;
        }
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

}  // namespace softmax_test

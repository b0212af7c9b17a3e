#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "tests/depth.h"
#include "tests/rows_close.h"
#include "tests/support.h"
#include <mica/autograd/grad.h>
#include <mica/autograd/gradcheck.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/parallel.h>
#include <mica/core/rng.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace reduce_test {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

bool same_bits(const Tensor& a, const Tensor& b) {
  const Tensor left = contiguous_data(a.to(Device::cpu()));
  const Tensor right = contiguous_data(b.to(Device::cpu()));
  return left.shape() == right.shape() && left.dtype() == right.dtype() &&
         (left.numel() == 0 || std::memcmp(left.raw_data(), right.raw_data(), left.bytes()) == 0);
}

// For each result, in row-major order, the elements that it is computed from.
std::vector<std::vector<double>> groups_of(const Tensor& x, const Dims& axes) {
  std::vector<bool> reduced(x.dim(), axes.empty());
  for (const std::int64_t axis : axes) {
    reduced[axis < 0 ? axis + x.dim() : axis] = true;
  }
  std::int64_t results = 1;
  for (int i = 0; i < x.dim(); ++i) {
    results *= reduced[i] ? 1 : x.shape()[i];
  }
  std::vector<std::vector<double>> groups(results);
  // The elements in order: `index` counts through the axes.
  std::vector<std::int64_t> index(x.dim()), steps(x.dim());
  for (std::int64_t i = x.dim() - 1, step = 1; i >= 0; --i) {
    steps[i] = reduced[i] ? 0 : step;
    step *= reduced[i] ? 1 : x.shape()[i];
  }
  std::int64_t where = 0;
  for (const double value : to_vector<double>(x)) {
    groups[where].push_back(value);
    for (int i = x.dim() - 1; i >= 0; --i) {
      where += steps[i];
      if (++index[i] < x.shape()[i]) {
        break;
      }
      where -= index[i] * steps[i];
      index[i] = 0;
    }
  }
  return groups;
}

template <class F>
std::vector<double> reference(const Tensor& x, const Dims& axes, F f) {
  std::vector<double> results;
  for (const std::vector<double>& group : groups_of(x, axes)) {
    results.push_back(f(group));
  }
  return results;
}

double plain_sum(const std::vector<double>& v) {
  long double sum = 0;
  for (const double x : v) {
    sum += x;
  }
  return static_cast<double>(sum);
}

double plain_mean(const std::vector<double>& v) { return plain_sum(v) / static_cast<double>(v.size()); }

// A shape and the axes to reduce, for each of the layouts that the kernels distinguish.
struct Case {
  Shape shape;
  Dims axes;
};

const std::vector<Case> kCases{
    {{}, {}},
    {{1}, {0}},
    {{7}, {0}},
    {{5000}, {}},
    {{200'001}, {0}},
    {{3, 70'001}, {1}},
    {{3, 5}, {}},
    {{3, 5}, {0}},
    {{3, 5}, {-1}},
    {{130, 67}, {1}},
    {{130, 67}, {0}},
    {{777, 300}, {0}},
    {{9000, 33}, {0}},
    {{9000, 3}, {0}},
    {{2, 1, 3}, {1}},
    {{4, 6, 5}, {1}},
    {{4, 6, 50}, {1}},
    {{4, 6, 50}, {0, 1}},
    {{4, 6, 50}, {0, 2}},
    {{4, 6, 50}, {2, 1}},
    {{40, 16, 9}, {-3, -2, -1}},
    {{3, 4, 5, 6}, {1, 3}},
    {{3, 4, 5, 6}, {0, 2}},
    {{2, 3, 2, 3, 2, 3, 2, 3}, {1, 4, 6}},
    {{0}, {0}},
    {{0, 3}, {0}},
    {{3, 0}, {0}},
    {{3, 0, 4}, {1}},
    {{3, 0, 4}, {}},
};

std::string describe(const Case& c, Device device) {
  return to_string(c.shape) + " over " + to_string(c.axes) + " on " + to_string(device);
}

// x in several layouts: as it is; with its axes reversed in memory; and as every second element of a longer last axis,
// with an offset of one.
Tensors layouts(const Tensor& x) {
  Shape turned = x.shape();
  std::reverse(turned.begin(), turned.end());
  const Tensor base = empty(turned, x.dtype(), x.device());
  Strides backward = base.strides();
  std::reverse(backward.begin(), backward.end());

  Strides gaps = contiguous_strides(x.shape());
  for (std::int64_t& stride : gaps) {
    stride *= 2;
  }
  const Tensor room = empty({2 * x.numel() + 1}, x.dtype(), x.device());
  const Tensors views{as_strided(base, x.shape(), backward, 0), as_strided(room, x.shape(), gaps, 1),
                      as_strided(empty({x.numel() + 1}, x.dtype(), x.device()), x.shape(), x.strides(), 1), x};
  for (const Tensor& view : views) {
    if (!view.is_same(x)) {
      copy_into(view, x);
    }
  }
  return views;
}

TEST(Reduce, SumAndMeanMatchReference) {
  OneIn three(3);
  for (const Device device : test_devices()) {
    for (const Case& c : kCases) {
      for (const Tensor& x : layouts(randn(c.shape, float32, device))) {
        if (three.skips()) {
          continue;
        }
        // An upper bound of such a sum's root mean square. The rounding error depends on the width of the CPU's
        // vectors.
        const double size = std::sqrt(static_cast<double>(std::max<std::int64_t>(x.numel(), 1)));
        expect_close(sum(x, c.axes), reference(x, c.axes, plain_sum), 1e-6, 1e-6 * size, describe(c, device));
        expect_close(mean(x, c.axes), reference(x, c.axes, plain_mean), 1e-6, 1e-6, describe(c, device));
      }
      const Tensor d = randn(c.shape, float64, device);
      expect_close(sum(d, c.axes, true), reference(d, c.axes, plain_sum), 1e-13, 1e-12, describe(c, device));
    }
  }
}

TEST(Reduce, SumOfOneElementAxesKeepsShapes) {
  const Tensor x = randn({2, 1, 3});
  EXPECT_EQ(sum(x, {1}).shape(), Shape({2, 3}));
  EXPECT_EQ(sum(x, {1}, true).shape(), Shape({2, 1, 3}));
  EXPECT_EQ(sum(x, {0, 2}, true).shape(), Shape({1, 1, 1}));
  EXPECT_EQ(sum(x).shape(), Shape{});
  EXPECT_EQ(sum(x, {}, true).shape(), Shape({1, 1, 1}));
}

TEST(Reduce, SumsOf16BitFloatsAreKeptInFloat32) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float16, bfloat16}) {
      // A sum in 16 bits would stop at 2048 or 256. In float16, Σ x could overflow although the mean does not.
      EXPECT_EQ(sum(ones({8192}, dtype, device)).item(), 8192);
      EXPECT_EQ(mean(full({300, 4}, 512, dtype, device), {0}).to(float32).to(Device::cpu()).data<float>()[3], 512);
      const Tensor x = randn({60, 100}, dtype, device);
      expect_rows_close(sum(x, {0}), reference(x, {0}, plain_sum), 100, 1e-5, "columns");
      EXPECT_EQ(sum(x, {1}).dtype(), dtype);
    }
  }
}

TEST(Reduce, SumsOfIntegersAreInt64) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {int64, int32, uint8}) {
      const Tensor x = randint(0, 256, {70, 30}, dtype, device);
      EXPECT_EQ(sum(x, {0}).dtype(), int64);
      expect_close(sum(x, {0}), reference(x, {0}, plain_sum), 0, 0);
      expect_close(sum(x, {1}), reference(x, {1}, plain_sum), 0, 0);
    }
    const Tensor large = full({3000}, 2'000'000'000, int32, device);
    EXPECT_EQ(sum(large).item(), 6e12);
    EXPECT_EQ(sum(ones({1000}, boolean, device)).item(), 1000);
  }
}

TEST(Reduce, SumIsAccurate) {
  for (const Device device : test_devices()) {
    const Tensor x = rand({1 << 20}, float32, device);
    expect_close(sum(x), reference(x, {}, plain_sum), 3e-7, 0);
    const Tensor columns = rand({1 << 15, 16}, float32, device);
    expect_close(sum(columns, {0}), reference(columns, {0}, plain_sum), 5e-7, 0);
  }
}

// The elements of a result are short runs with gaps between them, and several runs are reduced at a time. Sums of small
// integers are exact in any order.
TEST(Reduce, ShortStridedRuns) {
  const std::vector<std::pair<std::int64_t, std::int64_t>> sizes{{1, 3},   {2, 40},  {63, 3},   {64, 100},
                                                                 {65, 40}, {130, 1}, {1000, 3}, {22'000, 3}};
  for (const auto& [rows, run] : sizes) {
    const std::int64_t width = run + 2;
    std::vector<double> values(3 * rows * width);
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = static_cast<double>(i * i % 7) - 3;
    }
    const Tensor wide = from_data(values, {3, rows, width});
    for (const DType dtype : {float32, float64, bfloat16, float16, int32}) {
      const Tensor x = slice(wide.to(dtype), 2, 1, 1 + run);
      const std::string what = fmt::format("{} rows of {}, {}", rows, run, dtype);
      const Tensor expected = from_data(reference(x, {1, 2}, plain_sum), {3});
      EXPECT_EQ(to_vector<double>(sum(x, {1, 2})), to_vector<double>(expected.to(is_floating(dtype) ? dtype : int64)))
          << what;
      EXPECT_EQ(to_vector<double>(amax(x, {1, 2})),
                reference(x, {1, 2}, [](const auto& v) { return *std::max_element(v.begin(), v.end()); }))
          << what;
    }
  }
}

TEST(Reduce, SumToUndoesBroadcast) {
  for (const Device device : test_devices()) {
    const Tensor x = randn({4, 3, 5}, float64, device);
    EXPECT_TRUE(sum_to(x, {4, 3, 5}).is_same(x));
    expect_close(sum_to(x, {5}), reference(x, {0, 1}, plain_sum), 1e-12, 1e-12);
    expect_close(sum_to(x, {3, 1}), reference(x, {0, 2}, plain_sum), 1e-12, 1e-12);
    expect_close(sum_to(x, {1, 3, 5}), reference(x, {0}, plain_sum), 1e-12, 1e-12);
    expect_close(sum_to(x, {}), reference(x, {}, plain_sum), 1e-12, 1e-12);
    EXPECT_EQ(sum_to(x, {3, 1}).shape(), Shape({3, 1}));
    EXPECT_EQ(to_vector<double>(sum_to(zeros({0, 2}, float64, device), {1, 2})), std::vector<double>({0, 0}));
    expect_error([&] { sum_to(x, {4, 5}); }, "sum_to: expected a shape that broadcasts to [4, 3, 5], got [4, 5]");
    expect_error([&] { sum_to(x, {1, 4, 3, 5}); }, "sum_to");
  }
}

TEST(Reduce, SumGradients) {
  for (const Device device : test_devices()) {
    const Tensor x = randn({3, 4, 5}, float64, device);
    using autograd::gradcheck;
    EXPECT_TRUE(gradcheck([](const Tensor& a) { return sum(a); }, {x}));
    EXPECT_TRUE(gradcheck([](const Tensor& a) { return sum(a, {1}); }, {x}));
    EXPECT_TRUE(gradcheck([](const Tensor& a) { return sum(a, {0, -1}, true); }, {x}));
    EXPECT_TRUE(gradcheck([](const Tensor& a) { return mean(a, {1, 2}); }, {x}));
    EXPECT_TRUE(gradcheck([](const Tensor& a) { return mean(a); }, {x}));
    EXPECT_TRUE(gradcheck([](const Tensor& a) { return sum_to(a, {4, 1}); }, {x}));
  }
}

double plain_var(const std::vector<double>& v, int correction) {
  const double mean = plain_mean(v);
  double sum = 0;
  for (const double x : v) {
    sum += (x - mean) * (x - mean);
  }
  return sum / std::max<double>(static_cast<double>(v.size()) - correction, 0);
}

double plain_logsumexp(const std::vector<double>& v) {
  const double largest = v.empty() ? -kInf : *std::max_element(v.begin(), v.end());
  double sum = 0;
  for (const double x : v) {
    sum += std::exp(x - largest);
  }
  return sum == 0 ? -kInf : largest + std::log(sum);
}

TEST(Reduce, VarMatchesReference) {
  OneIn three(3);  // tests each layout with one of the corrections
  for (const Device device : test_devices()) {
    for (const Case& c : kCases) {
      for (const int correction : {0, 1, 3}) {
        const auto expected = [&](const std::vector<double>& v) { return plain_var(v, correction); };
        const Tensor x = randn(c.shape, float64, device);
        expect_close(var(x, c.axes, correction), reference(x, c.axes, expected), 1e-12, 0, describe(c, device));
        for (const Tensor& y : layouts(randn(c.shape, float32, device))) {
          if (three.skips()) {
            continue;
          }
          expect_close(var(y, c.axes, correction), reference(y, c.axes, expected), 1e-5, 1e-12, describe(c, device));
        }
      }
    }
  }
}

// Sums over several runs of adjacent elements, each of which is a part of a leaf, a leaf, or several. Elements are
// whole numbers, so that sums are exact.
TEST(Reduce, RunsOfAllLengths) {
  manual_seed(22);
  for (const Device device : test_devices()) {
    for (const std::int64_t length : {30, 4096, 4097, 5000, 8193}) {
      for (const std::int64_t runs : {1, 2, 5, 21}) {
        const Tensor x = randint(-4, 5, {runs, 2, length});
        const Tensor exact = from_data(reference(x, {0, 2}, plain_sum), {2});
        for (const DType dtype : {float32, bfloat16, int64}) {
          SCOPED_TRACE(fmt::format("{} runs of {} {}", runs, length, dtype));
          const Tensor y = sum(x.to(device, dtype), {0, 2});
          expect_close(y, exact.to(dtype), 0, 0);
        }
      }
    }
  }
}

TEST(Reduce, StddevAndVectorNorm) {
  manual_seed(21);
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, float16, bfloat16}) {
      const Tensor x = randn({4, 5}, dtype, device);
      const double tolerance = dtype == float64 ? 1e-13 : 4 * epsilon_of(dtype);
      const auto expect = [&](const Tensor& y, const std::function<double(const std::vector<double>&)>& of) {
        EXPECT_EQ(y.dtype(), dtype);
        expect_close(y, reference(x, {1}, of), tolerance, 0);
      };
      const auto power_sum = [](double p) {
        return [p](const std::vector<double>& v) {
          double sum = 0;
          for (const double element : v) {
            sum += std::pow(std::abs(element), p);
          }
          return std::pow(sum, 1 / p);
        };
      };
      const auto sizes = [](std::vector<double> v) {
        for (double& element : v) {
          element = std::abs(element);
        }
        return v;
      };
      expect(stddev(x, {1}), [](const std::vector<double>& v) { return std::sqrt(plain_var(v, 1)); });
      expect(stddev(x, {1}, 0), [](const std::vector<double>& v) { return std::sqrt(plain_var(v, 0)); });
      for (const double p : {1.0, 2.0, 3.0, 0.5, -1.0}) {
        expect(vector_norm(x, {1}, p), power_sum(p));
      }
      expect(vector_norm(x, {1}, kInf), [&](const std::vector<double>& v) { return std::ranges::max(sizes(v)); });
      expect(vector_norm(x, {1}, -kInf), [&](const std::vector<double>& v) { return std::ranges::min(sizes(v)); });
      EXPECT_EQ(vector_norm(x, {0}, 2, true).shape(), (Shape{1, 5}));
      EXPECT_EQ(vector_norm(from_data<double>({0.0, 2.0, -1.0}).to(device, dtype), {}, 0).item(), 2);
    }
    // The squares overflow in float16.
    EXPECT_EQ(vector_norm(full({4}, 300, float16, device)).item(), 600);

    const Tensor x = randn({3, 4}, float64, device);
    for (const double p : {1.0, 2.0, 3.0, -2.0, kInf}) {
      const auto norms = [&](const Tensor& a) { return vector_norm(a, {1}, p); };
      EXPECT_TRUE(autograd::gradcheck(norms, {x})) << p;
      EXPECT_TRUE(autograd::gradgradcheck(norms, {x})) << p;
    }
    EXPECT_TRUE(autograd::gradcheck([](const Tensor& a) { return stddev(a, {0}); }, {x}));
    EXPECT_TRUE(autograd::gradgradcheck([](const Tensor& a) { return vector_norm(a, {1}) * stddev(a, {1}); }, {x}));
    for (const auto& f : {std::function<Tensor(const Tensor&)>([](const Tensor& a) { return vector_norm(a); }),
                          std::function<Tensor(const Tensor&)>([](const Tensor& a) { return vector_norm(a, {}, 3); }),
                          std::function<Tensor(const Tensor&)>([](const Tensor& a) { return stddev(a); })}) {
      const Tensor zero = zeros({3}, float64, device).requires_grad_();
      const Tensor y = f(zero);
      EXPECT_EQ(y.item(), 0);
      y.backward();
      expect_close(zero.grad(), std::vector<double>{0, 0, 0}, 0, 0);
    }
  }
  expect_error([] { vector_norm(ones({2}, int64)); }, "vector_norm: expected a floating dtype, got int64");
  expect_error([] { vector_norm(ones({2}), {}, std::nan("")); }, "vector_norm: expected a number p, got NaN");
  expect_error([] { stddev(ones({2}, int32)); }, "stddev: expected a floating dtype, got int32");
}

// |x|ᵖ has no derivative at 0 for p ≤ 1, and an infinite second one for p < 2; both are taken to be 0.
TEST(Reduce, VectorNormAtZeros) {
  using Values = std::vector<double>;
  for (const Device device : test_devices()) {
    for (const double p : {-1.0, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0}) {
      SCOPED_TRACE(p);
      const Tensor x = from_data<double>({0.0, 3.0, -4.0, 0.0, 0.0, 0.0}, {2, 3}, device).requires_grad_();
      const Tensor norms = vector_norm(x, {1}, p);
      const double norm = p < 0 ? 0 : std::pow(std::pow(3, p) + std::pow(4, p), 1 / p);
      expect_close(norms, Values{norm, 0}, 1e-14, 0);
      const Tensor dx = autograd::grad({norms}, {x}, {ones_like(norms)}, {.create_graph = true})[0];
      // d norm / dx = sign(x) · (|x| / norm)ᵖ⁻¹
      const double at_3 = p < 0 ? 0 : std::pow(3 / norm, p - 1), at_4 = p < 0 ? 0 : -std::pow(4 / norm, p - 1);
      expect_close(dx, Values{0, at_3, at_4, 0, 0, 0}, 1e-14, 0);
      const Tensor ddx = autograd::grad({dx}, {x}, {ones_like(dx)})[0];
      for (const double value : to_vector<double>(ddx)) {
        EXPECT_TRUE(std::isfinite(value)) << value;
      }
    }
    EXPECT_EQ(vector_norm(full({2}, kInf, float64, device), {}, -1).item(), kInf);
    const Tensor x = from_data({2.0f, 2.0f, 0.0f, 1.0f}, {2, 2}, device).requires_grad_();
    sum(stddev(x, {1})).backward();
    expect_close(x.grad(), Values{0, 0, -std::sqrt(0.5), std::sqrt(0.5)}, 1e-6, 0);
  }
}

TEST(Reduce, VarOfLargeMeanIsAccurate) {
  for (const Device device : test_devices()) {
    Tensor x = randn({512, 300}, float64);
    for (std::int64_t i = 0; i < x.numel(); ++i) {
      x.data<double>()[i] += 1e4;
    }
    x = x.to(float32).to(device);
    const auto expected = [](const std::vector<double>& v) { return plain_var(v, 1); };
    expect_close(var(x, {0}), reference(x, {0}, expected), 2e-6, 0);
    expect_close(var(x, {1}), reference(x, {1}, expected), 2e-6, 0);
    expect_close(var(x), reference(x, {}, expected), 2e-6, 0);
  }
}

TEST(Reduce, VarOfVeryLargeMean) {
  // A mean of 1e6 rounded to float32 is off by up to 0.03, and the squares of the distances from it by 1e-3.
  for (const Device device : test_devices()) {
    for (const Shape& shape : {Shape{40, 70}, Shape{3, 5000}, Shape{3000, 3}, Shape{2, 70'000}}) {
      const Tensor x = add(randn(shape, float64, device), 1e6).to(float32);
      const Tensor dy = randn({shape[0]}, float32, device);
      const std::vector<double> values = to_vector<double>(x);
      const std::vector<double> row_gradients = to_vector<double>(dy);
      const auto expected = [](const std::vector<double>& v) { return plain_var(v, 1); };
      for (const int axis : {0, 1}) {
        expect_close(var(x, {axis}), reference(x, {axis}, expected), 2e-6, 0, to_string(shape));
      }
      expect_close(var(x), reference(x, {}, expected), 2e-6, 0, to_string(shape));

      const Tensor leaf = x.detach().requires_grad_();
      var(leaf, {1}).backward(dy);
      std::vector<double> gradient;
      for (std::int64_t row = 0; row < shape[0]; ++row) {
        const std::vector<double> v(values.begin() + row * shape[1], values.begin() + (row + 1) * shape[1]);
        const double mean = plain_mean(v);
        for (const double element : v) {
          gradient.push_back(2 * row_gradients[row] * (element - mean) / static_cast<double>(shape[1] - 1));
        }
      }
      const double largest = 4 * 4 * 4.0 / static_cast<double>(shape[1] - 1);
      expect_close(leaf.grad(), gradient, 1e-6, 1e-6 * largest, to_string(shape));
    }
    EXPECT_TRUE(std::isnan(var(from_data<float>({1, INFINITY}, device)).item()));
    EXPECT_TRUE(std::isnan(var(from_data<float>({NAN, 1}, device)).item()));
    EXPECT_EQ(var(from_data<float>({3e38f, -3e38f}, device)).item(), INFINITY);
    EXPECT_EQ(var(full({5}, 3e38, float32, device)).item(), 0);
  }
}

TEST(Reduce, SumsOfIntegersWrapAround) {
  for (const Device device : test_devices()) {
    const Tensor x = full({3}, 0x1p62, int64, device);
    EXPECT_EQ(to_vector<std::int64_t>(sum(x))[0], INT64_MIN + (std::int64_t{1} << 62));
    EXPECT_EQ(to_vector<std::int64_t>(sum(full({2}, -0x1p63, int64, device)))[0], 0);
  }
}

TEST(Reduce, LogSumExpMatchesReference) {
  for (const Device device : test_devices()) {
    for (const Case& c : kCases) {
      const Tensor x = randn(c.shape, float64, device);
      expect_close(logsumexp(x, c.axes, true), reference(x, c.axes, plain_logsumexp), 1e-12, 1e-14,
                   describe(c, device));
      for (const Tensor& y : layouts(randn(c.shape, float32, device))) {
        expect_close(logsumexp(y, c.axes), reference(y, c.axes, plain_logsumexp), 1e-6, 1e-6, describe(c, device));
      }
    }
    const Tensor h = randn({40, 50}, bfloat16, device);
    expect_close(logsumexp(h, {1}), reference(h, {1}, plain_logsumexp), 5e-3, 0);
  }
}

TEST(Reduce, LogSumExpOfExtremeValues) {
  for (const Device device : test_devices()) {
    const float inf = static_cast<float>(kInf);
    const Tensor x = from_data({-inf, -inf, 1e4f, 1e4f, -1e4f, -1e4f, inf, 0.f, -inf, 3.f, inf, -inf}, {6, 2}, device);
    x.requires_grad_();
    const Tensor y = logsumexp(x, {1});
    const double log2 = std::log(2.0);
    expect_close(y, std::vector<double>{-kInf, 1e4 + log2, -1e4 + log2, kInf, 3, kInf}, 1e-7, 0);
    y.backward(ones_like(y));
    const std::vector<double> g = to_vector<double>(x.grad());
    EXPECT_EQ(std::vector<double>(g.begin(), g.begin() + 2), (std::vector<double>{0, 0}));
    for (int i = 2; i < 6; ++i) {
      EXPECT_NEAR(g[i], 0.5, 5e-4);  // y itself has a rounding error of 1e-3
    }
    EXPECT_EQ(g[8], 0);
    EXPECT_EQ(g[9], 1);
    expect_close(logsumexp(from_data({static_cast<float>(kNaN), 1.f}, {2}, device)), std::vector<double>{kNaN}, 0, 0);
  }
}

TEST(Reduce, ExtremesMatchReference) {
  OneIn three(3);
  for (const Device device : test_devices()) {
    for (const Case& c : kCases) {
      if (numel_of(c.shape) == 0) {
        continue;
      }
      for (const DType dtype : {float32, float64, float16, bfloat16, int64, int32, uint8}) {
        if ((numel_of(c.shape) > 50'000 && dtype != float32) || three.skips()) {
          continue;
        }
        // There are few distinct values, so that ties are common.
        const Tensor x = randint(0, 20, c.shape, int64, device).to(dtype);
        const std::vector<double> v = to_vector<double>(x);
        EXPECT_EQ(max(x).item(), *std::max_element(v.begin(), v.end()));
        EXPECT_EQ(min(x).item(), *std::min_element(v.begin(), v.end()));
        EXPECT_EQ(max(x).dtype(), dtype);
        for (int axis = 0; axis < x.dim(); ++axis) {
          const auto [largest, at] = max(x, axis);
          const auto [smallest, low] = min(x, axis - x.dim(), true);
          EXPECT_EQ(low.shape()[axis], 1);
          const auto first = [](const std::vector<double>& g, auto it) { return static_cast<double>(it - g.begin()); };
          const std::string what = describe({c.shape, {axis}}, device);
          expect_close(largest, reference(x, {axis}, [](auto& g) { return *std::max_element(g.begin(), g.end()); }), 0,
                       0, what);
          expect_close(smallest, reference(x, {axis}, [](auto& g) { return *std::min_element(g.begin(), g.end()); }), 0,
                       0, what);
          const auto where_max =
              reference(x, {axis}, [&](auto& g) { return first(g, std::max_element(g.begin(), g.end())); });
          expect_close(at, where_max, 0, 0, what);
          expect_close(argmax(x, axis), where_max, 0, 0, what);
          const auto where_min =
              reference(x, {axis}, [&](auto& g) { return first(g, std::min_element(g.begin(), g.end())); });
          expect_close(low, where_min, 0, 0, what);
          expect_close(argmin(x, axis), where_min, 0, 0, what);
        }
      }
    }
  }
}

TEST(Reduce, ExtremesOfNaNAndInfinity) {
  for (const Device device : test_devices()) {
    for (const std::int64_t n : {3, 40, 5000, 100'000}) {
      std::vector<float> values(3 * n, -static_cast<float>(kInf));
      values[n + n / 2] = static_cast<float>(kNaN);
      values[2 * n - 1] = static_cast<float>(kNaN);
      values[2 * n + 1] = 7;
      const Tensor x = from_data(values, {3, n}, device);
      for (const Tensor& y : layouts(x)) {
        const auto [largest, at] = max(y, 1);
        expect_close(largest, std::vector<double>{-kInf, kNaN, 7}, 0, 0);
        expect_close(at, std::vector<double>{0, static_cast<double>(n / 2), 1}, 0, 0);
        const auto [smallest, low] = min(y, 1);
        expect_close(smallest, std::vector<double>{-kInf, kNaN, -kInf}, 0, 0);
        expect_close(low, std::vector<double>{0, static_cast<double>(n / 2), 0}, 0, 0);
        EXPECT_TRUE(std::isnan(max(y).item()));
      }
    }
  }
}

TEST(Reduce, StatisticsGradients) {
  using autograd::gradcheck;
  for (const Device device : test_devices()) {
    const Tensor x = randn({3, 4, 5}, float64, device);
    EXPECT_TRUE(gradcheck([](const Tensor& a) { return var(a); }, {x}));
    EXPECT_TRUE(gradcheck([](const Tensor& a) { return var(a, {0, 2}, 0); }, {x}));
    EXPECT_TRUE(gradcheck([](const Tensor& a) { return var(a, {-2}, 2, true); }, {x}));
    EXPECT_TRUE(gradcheck([](const Tensor& a) { return logsumexp(a); }, {x}));
    EXPECT_TRUE(gradcheck([](const Tensor& a) { return logsumexp(a, {1}); }, {x}));
    EXPECT_TRUE(gradcheck([](const Tensor& a) { return logsumexp(a, {0, 2}, true); }, {x}));
    EXPECT_TRUE(gradcheck([](const Tensor& a) { return max(a); }, {x}));
    EXPECT_TRUE(gradcheck([](const Tensor& a) { return min(a); }, {x}));
    for (const int axis : {0, 1, -1}) {
      EXPECT_TRUE(gradcheck([axis](const Tensor& a) { return max(a, axis).values; }, {x}));
      EXPECT_TRUE(gradcheck([axis](const Tensor& a) { return min(a, axis, true).values; }, {x}));
    }
  }
}

TEST(Reduce, GradientOfTies) {
  for (const Device device : test_devices()) {
    const Tensor x = from_data({3.f, 1.f, 3.f, 3.f}, {2, 2}, device).requires_grad_();
    max(x).backward(full({}, 6, float32, device));
    EXPECT_EQ(to_vector<float>(x.grad()), (std::vector<float>{2, 0, 2, 2}));  // shared evenly
    x.set_grad({});
    max(x, 1).values.backward(from_data({5.f, 7.f}, device));
    EXPECT_EQ(to_vector<float>(x.grad()), (std::vector<float>{5, 0, 7, 0}));  // goes to the first
    EXPECT_FALSE(max(x, 1).indices.requires_grad());
    EXPECT_FALSE(argmax(x, 1).requires_grad());
  }
}

TEST(Reduce, GradientsOf16BitFloats) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float16, bfloat16}) {
      const Tensor x = randn({6, 50}, dtype, device).requires_grad_();
      const Tensor wide = x.detach().to(float64).requires_grad_();
      const Tensor dy = randn({6}, dtype, device);
      for (const auto& f : std::vector<std::function<Tensor(const Tensor&)>>{
               [](const Tensor& a) { return sum(a, {1}); }, [](const Tensor& a) { return mean(a, {1}); },
               [](const Tensor& a) { return var(a, {1}); }, [](const Tensor& a) { return logsumexp(a, {1}); },
               [](const Tensor& a) { return max(a, 1).values; }}) {
        x.set_grad({});
        wide.set_grad({});
        f(x).backward(dy);
        f(wide).backward(dy.to(float64));
        EXPECT_EQ(x.grad().dtype(), dtype);
        // The backward of logsumexp computes its weights from the rounded result.
        expect_rows_close(x.grad(), to_vector<double>(wide.grad()), 50, 3 * epsilon_of(dtype), to_string(device));
      }
    }
  }
}

TEST(Reduce, RunsAreBitIdentical) {
  for (const Device device : test_devices()) {
    for (const Case& c : kCases) {
      const Tensor x = randn(c.shape, float32, device);
      EXPECT_TRUE(same_bits(sum(x, c.axes), sum(x, c.axes))) << describe(c, device);
      EXPECT_TRUE(same_bits(var(x, c.axes, 0), var(x, c.axes, 0)) || x.numel() == 0) << describe(c, device);
      EXPECT_TRUE(same_bits(logsumexp(x, c.axes), logsumexp(x, c.axes))) << describe(c, device);
    }
  }
}

TEST(Reduce, SameBitsForAnyNumberOfThreads) {
  const int before = num_threads();
  for (const Case& c : kCases) {
    const Tensor x = randn(c.shape);
    const auto results = [&](int threads) {
      set_num_threads(threads);
      return Tensors{sum(x, c.axes), mean(x, c.axes), var(x, c.axes, 0), logsumexp(x, c.axes)};
    };
    const Tensors one = results(1);
    for (const int threads : {2, 5}) {
      const Tensors more = results(threads);
      for (std::size_t i = 0; i < one.size(); ++i) {
        EXPECT_TRUE(same_bits(one[i], more[i])) << describe(c, Device::cpu()) << ", result " << i;
      }
    }
  }
  set_num_threads(before);
}

TEST(Reduce, RowDoesNotDependOnItsNeighbors) {
  for (const Device device : test_devices()) {
    for (const std::int64_t n : {5, 100, 1000, 70'000}) {
      const Tensor row = randn({1, n}, float32, device);
      const Tensor many = empty({300'000 / n, n}, float32, device);
      copy_into(many, broadcast_view(row, many.shape()));
      const std::vector<double> sums = to_vector<double>(sum(many, {1}));
      EXPECT_EQ(sums, std::vector<double>(sums.size(), sum(row, {1}).item()));
    }
  }
}

TEST(Reduce, ExtremesOverSomeAxes) {
  for (const Device device : test_devices()) {
    const Tensor x = from_data<double>({1.0, 5.0, 5.0, 2.0, -3.0, 5.0, 0.0, 4.0}, {2, 2, 2}, device);
    expect_close(amax(x, {0, 2}), {5, 5}, 0, 0);
    expect_close(amin(x, {-1, 0}, true), {-3, 0}, 0, 0);
    EXPECT_EQ(amin(x, {-1, 0}, true).shape(), (Shape{1, 2, 1}));
    EXPECT_EQ(argmax(transpose(x, 0, 2)).item(), 2);
    EXPECT_EQ(argmin(x).item(), 4);
    const Tensor ties = x.detach().requires_grad_();
    amax(ties, {0, 2}).backward(from_data<double>({4.0, 6.0}, {2}, device));
    expect_close(ties.grad(), {0, 2, 6, 0, 0, 2, 0, 0}, 0, 0);
    const Tensor distinct = randn({3, 4, 2}, float64, device);
    EXPECT_TRUE(autograd::gradcheck([](const Tensor& a) { return amin(a, {0, 2}); }, {distinct}));
    EXPECT_TRUE(autograd::gradcheck([](const Tensor& a) { return amax(a, {1}, true); }, {distinct}));
    expect_close(var(x, {}, 0.5), {59.875 / 7.5}, 1e-14, 0);
  }
}

TEST(Reduce, BadAxesAreErrors) {
  const Tensor x = randn({2, 3});
  expect_error([&] { sum(x, {2}); }, "sum: expected an axis in [-2, 2), got 2");
  expect_error([&] { sum(x, {0, -2}); }, "sum: expected each axis once, got [0, -2]");
  expect_error([&] { max(x, 2); }, "max: expected an axis in [-2, 2), got 2");
  expect_error([&] { argmax(zeros({2, 0}), 1); }, "argmax: expected an axis with elements, got axis 1 of shape [2, 0]");
  expect_error([&] { min(zeros({2, 0})); }, "min: expected at least one element, got shape [2, 0]");
  expect_error([&] { amax(zeros({2, 0}), {1}); }, "amax: expected at least one element, got shape [2, 0] and axes [1]");
  expect_error([&] { amin(zeros({2}, boolean)); }, "amin: expected a numeric dtype, got bool");
  expect_error([&] { argmin(zeros({2, 0})); }, "argmin: expected at least one element, got shape [2, 0]");
  EXPECT_EQ(amax(zeros({2, 0}), {0}).shape(), Shape({0}));
  expect_error([&] { max(zeros({2}, boolean)); }, "max: expected a numeric dtype, got bool");
  expect_error([&] { var(x.to(int32)); }, "var: expected a floating dtype, got int32");
  expect_error([&] { logsumexp(x.to(int32)); }, "logsumexp: expected a floating dtype, got int32");
  EXPECT_EQ(max(zeros({0, 2}), 1).values.shape(), Shape({0}));
  expect_error([&] { mean(x.to(int64)); }, "mean: expected a floating dtype, got int64");
}

TEST(Prod, Values) {
  for (const Device device : test_devices()) {
    const Tensor x = from_data<double>({1.0, -2.0, 3.0, 4.0, 0.5, 6.0}, {2, 3}, device);
    for (const DType dtype : {float64, float32, float16, bfloat16}) {
      const Tensor t = x.to(dtype);
      expect_close(prod(t), std::vector<double>{-72}, 0, 0);
      expect_close(prod(t, {1}), std::vector<double>{-6, 12}, 0, 0);
      expect_close(prod(t, {-2}, true), std::vector<double>{4, -1, 18}, 0, 0);
      EXPECT_EQ(prod(t, {0}, true).shape(), (Shape{1, 3}));
      EXPECT_EQ(prod(t).dtype(), dtype);
    }
    const Tensor counts = arange(1, 8, 1, int64, device);
    for (const DType dtype : {int64, int32, uint8}) {
      EXPECT_EQ(prod(counts.to(dtype)).item(), 5040);
      EXPECT_EQ(prod(counts.to(dtype)).dtype(), int64);
    }
    expect_close(prod(eq(counts, 3), {}), std::vector<double>{0}, 0, 0);
    expect_close(prod(empty({0, 2}, float32, device), {0}), std::vector<double>{1, 1}, 0, 0);
    EXPECT_EQ(prod(empty({0, 2}, float32, device), {1}).shape(), (Shape{0}));
    EXPECT_EQ(prod(full({}, 7, float32, device)).item(), 7);
    // The product is computed in float32; in float16, that of the first elements would overflow.
    expect_close(prod(from_data({300.0F, 300.0F, 300.0F, 0.0001F, 0.001F}, device).to(float16)),
                 std::vector<double>{to_vector<double>(from_data({2.7F}).to(float16))[0]}, 2e-3, 0);
    const Tensor wide = randn({3, 4, 5, 2}, float64, device);
    expect_close(prod(wide, {0, 2}), prod(prod(wide, {2}), {0}), 1e-12, 1e-12);
  }
  expect_error([] { prod(ones({2}), {0, 0}); }, "prod: expected each axis once");
}

TEST(Prod, GradientsAtZeros) {
  for (const Device device : test_devices()) {
    // Rows with no zero, one zero and two zeros.
    const Tensor x = from_data<double>({1.5, -2.0, 3.0, 0.7, 2.0, 0.0, 3.0, -1.0, 0.0, 5.0, 0.0, 1.0}, {3, 4}, device);
    const auto f = [](const Tensor& t) { return prod(t, {1}); };
    EXPECT_TRUE(autograd::gradcheck(f, {x}));
    EXPECT_TRUE(autograd::gradgradcheck(f, {x}));
    const Tensor leaf = x.detach().requires_grad_();
    sum(prod(leaf, {1})).backward();
    expect_close(select(leaf.grad(), 0, 1), std::vector<double>{0, -6, 0, 0}, 0, 0);
    expect_close(select(leaf.grad(), 0, 2), std::vector<double>{0, 0, 0, 0}, 0, 0);
    EXPECT_TRUE(autograd::gradcheck([](const Tensor& t) { return prod(t); }, {slice(x, 0, 0, 2)}));
  }
}

}  // namespace reduce_test

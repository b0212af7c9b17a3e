#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "tests/rows_close.h"
#include "tests/support.h"
#include <mica/autograd/gradcheck.h>
#include <mica/core/creation.h>
#include <mica/core/rng.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/scan/scan.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace scan_test {

using Values = std::vector<double>;

// The cumulative sum along the last axis, in float64.
Values reference(const Tensor& x) {
  Values y = to_vector<double>(x);
  const auto n = static_cast<std::size_t>(x.size(-1));
  for (std::size_t i = 0; i < y.size(); ++i) {
    y[i] += i % n == 0 ? 0 : y[i - 1];
  }
  return y;
}

TEST(Cumsum, AllDtypesAndLengths) {
  manual_seed(1);
  for (const Device device : test_devices()) {
    // Chunks of the CUDA kernel have 8192 elements and its tiles 1024.
    for (const Shape& shape : {Shape{1, 1}, Shape{3, 7}, Shape{2, 1024}, Shape{2, 1025}, Shape{3, 8192}, Shape{2, 8193},
                               Shape{1, 50000}, Shape{900, 2}}) {
      for (const DType dtype : {float64, float32, float16, bfloat16, int64, int32, uint8, boolean}) {
        SCOPED_TRACE(fmt::format("{} {} {}", device, dtype, shape));
        const bool is_wide = dtype == float64 || dtype == float32;
        // Small whole numbers, whose sums are exact in float32. Results in 16 bits are rounded once.
        const Tensor x = randint(0, dtype == boolean ? 2 : 3, shape).to(dtype).to(device);
        const Tensor y = cumsum(x, 1);
        EXPECT_EQ(y.dtype(), is_floating(dtype) ? dtype : int64);
        const Values exact = reference(x);
        expect_close(y, is_wide || !is_floating(dtype) ? from_data(exact, shape) : from_data(exact, shape).to(dtype), 0,
                     0);
        if (is_wide) {
          const Tensor z = randn(shape, dtype, device);
          const double rounding = dtype == float64 ? 0x1p-52 : 0x1p-23;  // per addition; there are up to n
          expect_close(cumsum(z, -1), reference(z), 1e-6, rounding * static_cast<double>(shape[1]));
        }
      }
    }
  }
}

TEST(Cumsum, AnyAxisAndStrides) {
  manual_seed(2);
  for (const Device device : test_devices()) {
    const Tensor x = randn({4, 5, 6}, float64, device);
    for (int axis = 0; axis < 3; ++axis) {
      expect_close(transpose(cumsum(x, axis), axis, 2), reference(contiguous(transpose(x, axis, 2))), 1e-14, 1e-14);
    }
    EXPECT_EQ(cumsum(empty({3, 0}, float32, device), 1).shape(), (Shape{3, 0}));
    EXPECT_EQ(cumsum(empty({0, 3}, float32, device), 1).shape(), (Shape{0, 3}));
    const std::int64_t most = INT64_MAX;
    EXPECT_EQ(to_vector<std::int64_t>(cumsum(from_data<std::int64_t>({most, 1, 5}, device), 0)),
              (std::vector<std::int64_t>{most, INT64_MIN, INT64_MIN + 5}));
  }
}

// A long sum keeps its small terms.
TEST(Cumsum, LongSumsAreAccurate) {
  constexpr std::int64_t kLength = 2'000'000;
  for (const Device device : test_devices()) {
    for (const DType dtype : {float32, bfloat16}) {
      const Tensor x = full({kLength}, 0.1, dtype, device).requires_grad_();
      const double term = full({}, 0.1, dtype).item();
      const auto expect = [&](const Tensor& y, std::int64_t first, double step) {
        const Tensor some = slice(y, 0, first, kLength, 100'000);
        Values exact;
        for (std::int64_t i = first; i < kLength; i += 100'000) {
          exact.push_back(step > 0 ? step * static_cast<double>(i + 1) : -step * static_cast<double>(kLength - i));
        }
        expect_close(some, exact, epsilon_of(dtype), 0);
      };
      const Tensor y = cumsum(x, 0);
      expect(y, 99'999, term);
      y.backward(x.detach());
      expect(x.grad(), 0, -term);
    }
  }
}

TEST(Cumsum, SameBitsEachTimeAndForEachRow) {
  manual_seed(3);
  for (const Device device : test_devices()) {
    const Tensor row = randn({1, 40000}, float32, device);
    const std::vector<float> first = to_vector<float>(cumsum(row, 1));
    const Tensor rows = expand(row, {5, 40000});
    for (int i = 0; i < 3; ++i) {
      const Tensor y = cumsum(rows, 1);
      EXPECT_EQ(to_vector<float>(select(y, 0, i)), first);
    }
  }
}

TEST(Cumsum, Gradients) {
  manual_seed(4);
  for (const Device device : test_devices()) {
    const Tensor x = randn({3, 5, 2}, float64, device);
    for (const std::int64_t axis : {0, 1, 2}) {
      const auto f = [axis](const Tensor& t) { return cumsum(t * t, axis); };
      EXPECT_TRUE(autograd::gradcheck(f, {x}));
      EXPECT_TRUE(autograd::gradgradcheck(f, {x}));
    }
    // The gradient of the sum of all cumulative sums is, for each element, the number of sums that include it.
    const Tensor ones_of = ones({1, 20000}, float32, device).requires_grad_();
    sum(cumsum(ones_of, 1)).backward();
    expect_close(ones_of.grad(), reshape(20000 - arange(20000, float32), {1, 20000}), 0, 0);
  }
}

// A scan of the rows of x, and what it is for the first elements of a row, in float64.
struct ScanCase {
  const char* name;
  Tensor (*scan)(const Tensor&, std::int64_t);
  double (*join)(double before, double x);
};

const ScanCase kScans[] = {
    {"cumprod", cumprod, [](double before, double x) { return before * x; }},
    {"logcumsumexp", logcumsumexp,
     [](double before, double x) { return std::max(before, x) + std::log1p(std::exp(-std::abs(before - x))); }},
    {"cummax", [](const Tensor& x, std::int64_t axis) { return cummax(x, axis).values; },
     [](double before, double x) { return std::max(before, x); }},
    {"cummin", [](const Tensor& x, std::int64_t axis) { return cummin(x, axis).values; },
     [](double before, double x) { return std::min(before, x); }},
};

TEST(Scans, AllFloatsAndLengths) {
  manual_seed(5);
  for (const Device device : test_devices()) {
    for (const Shape& shape : {Shape{1, 1}, Shape{3, 7}, Shape{2, 1025}, Shape{2, 8193}, Shape{1, 40000}}) {
      for (const DType dtype : {float64, float32, float16, bfloat16}) {
        // Factors near 1, so that no product overflows.
        const Tensor x = (rand(shape, float64, device) * 0.01 + 0.995).to(dtype);
        for (const ScanCase& c : kScans) {
          SCOPED_TRACE(fmt::format("{} {} {} {}", c.name, device, dtype, shape));
          Values y = to_vector<double>(x);
          for (std::size_t i = 0; i < y.size(); ++i) {
            y[i] = i % static_cast<std::size_t>(shape[1]) == 0 ? y[i] : c.join(y[i - 1], y[i]);
          }
          const double rounding = dtype == float64 ? 1e-11 : dtype == float32 ? 2e-7 : epsilon_of(dtype);
          expect_close(c.scan(x, 1), y, rounding, 0);
        }
      }
    }
  }
}

TEST(Scans, GradientsOfAnyOrderAndAxis) {
  manual_seed(6);
  for (const Device device : test_devices()) {
    const Tensor x = randn({3, 4, 2}, float64, device);
    for (const ScanCase& c : kScans) {
      for (const std::int64_t axis : {0, 1, -1}) {
        SCOPED_TRACE(fmt::format("{} {}", c.name, axis));
        const auto f = [&](const Tensor& t) { return c.scan(t, axis); };
        EXPECT_TRUE(autograd::gradcheck(f, {x}));
        EXPECT_TRUE(autograd::gradgradcheck(f, {x}));
      }
      EXPECT_EQ(c.scan(empty({3, 0}, float32, device), 1).shape(), (Shape{3, 0}));
    }
    // Zeros: one, and two in a row.
    const Tensor zeros = from_data({2.0, 0.0, 3.0, 4.0, 0.0, 5.0, 0.0, 7.0}, {2, 4}, device);
    const auto product = [](const Tensor& t) { return cumprod(t, 1); };
    EXPECT_TRUE(autograd::gradcheck(product, {zeros}));
    EXPECT_TRUE(autograd::gradgradcheck(product, {zeros}));
    // Over several chunks of the CUDA kernel: dx[i] = Σ over j ≥ i of y[j] / x[i].
    const Tensor factors = (rand({1, 20000}, float64, device) * 0.01 + 0.995).requires_grad_();
    const Tensor y = cumprod(factors, 1);
    y.backward(ones_like(y));
    const Tensor sums = sum(y.detach()) - cumsum(y.detach(), 1) + y.detach();
    expect_close(factors.grad(), sums / factors.detach(), 1e-9, 0);
    const Tensor numbers = randn({2, 20000}, float64, device).requires_grad_();
    sum(logcumsumexp(numbers, 1)).backward();
    expect_close(sum(numbers.grad(), {1}), Values{20000, 20000}, 1e-9, 0);
  }
}

TEST(Scans, InfinitiesNanAndTies) {
  constexpr double kInfinity = INFINITY;
  for (const Device device : test_devices()) {
    const Tensor x = from_data({1.0, 3.0, 3.0, -kInfinity, NAN, 9.0, NAN, kInfinity}, device);
    const MaxResult largest = cummax(x, 0), smallest = cummin(x, 0);
    expect_close(largest.values, Values{1, 3, 3, 3, NAN, NAN, NAN, NAN}, 0, 0);
    expect_close(largest.indices, Values{0, 1, 2, 2, 4, 4, 6, 6}, 0, 0);
    expect_close(smallest.values, Values{1, 1, 1, -kInfinity, NAN, NAN, NAN, NAN}, 0, 0);
    expect_close(smallest.indices, Values{0, 0, 0, 3, 4, 4, 6, 6}, 0, 0);
    expect_close(cummax(from_data({false, true, false, true}, device), 0).indices, Values{0, 1, 1, 3}, 0, 0);
    expect_close(cummin(from_data<std::uint8_t>({3, 0, 0, 255}, device), 0).indices, Values{0, 1, 2, 2}, 0, 0);
    expect_close(logcumsumexp(from_data({-kInfinity, -kInfinity, 0.0, 0.0, kInfinity, kInfinity, NAN}, device), 0),
                 Values{-kInfinity, -kInfinity, 0, std::log(2.0), kInfinity, kInfinity, NAN}, 1e-15, 0);
    const Tensor none = from_data({-kInfinity, -kInfinity, 1.0}, device).requires_grad_();
    logcumsumexp(none, 0).backward(from_data({0.0, 0.0, 1.0}, device));
    expect_close(none.grad(), Values{0, 0, 1}, 0, 0);
    expect_close(cumprod(from_data({2.0, kInfinity, 3.0, 0.0, 1.0}, device), 0),
                 Values{2, kInfinity, kInfinity, NAN, NAN}, 0, 0);
    EXPECT_EQ(to_vector<std::int64_t>(cumprod(from_data<std::int64_t>({INT64_MAX, 2, -1}, device), 0)),
              (std::vector<std::int64_t>{INT64_MAX, -2, 2}));
    EXPECT_EQ(cumprod(from_data({true, false}, device), 0).dtype(), int64);
  }
  expect_error([] { cumprod(ones({2}), 1); }, "cumprod: ");
  expect_error([] { cummax(scalar(1), 0); }, "cummax: ");
  expect_error([] { logcumsumexp(ones({2}, int64), 0); }, "logcumsumexp: expected a floating dtype");
}

TEST(Cumsum, Errors) {
  expect_error([] { cumsum(ones({2}), 1); }, "cumsum: ");
  expect_error([] { cumsum(scalar(1), 0); }, "cumsum: ");
}

}  // namespace scan_test

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <numbers>
#include <string>
#include <vector>

#include "tests/rows_close.h"
#include "tests/support.h"
#include <mica/autograd/autocast.h>
#include <mica/autograd/grad.h>
#include <mica/autograd/gradcheck.h>
#include <mica/core/creation.h>
#include <mica/core/cuda_graph.h>
#include <mica/core/rng.h>
#include <mica/ops/einsum/einsum.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/fft/fft.h>
#include <mica/ops/inplace/inplace.h>
#include <mica/ops/rearrange/rearrange.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;
using autograd::gradcheck;
using autograd::gradgradcheck;

namespace fft_test {

using Values = std::vector<double>;

// The matrix of the transform, (n, n, 2).
Tensor matrix(std::int64_t n, bool inverse) {
  std::vector<double> values;
  for (std::int64_t k = 0; k < n; ++k) {
    for (std::int64_t j = 0; j < n; ++j) {
      const double angle = 2 * std::numbers::pi * static_cast<double>(k * j % n) / static_cast<double>(n);
      values.push_back(std::cos(angle));
      values.push_back(inverse ? std::sin(angle) : -std::sin(angle));
    }
  }
  return from_data(values, {n, n, 2});
}

// The sum by its definition along an axis of complex x, in float64 on the CPU.
Tensor reference(const Tensor& x_in, int axis, bool inverse) {
  const Tensor x = transpose(x_in.to(Device::cpu(), float64), axis, x_in.dim() - 2);
  const std::int64_t n = x_in.size(axis);
  const Tensor f = matrix(n, inverse);
  const auto times = [&](int i, int j) { return einsum("kj,...j->...k", {select(f, 2, i), select(x, -1, j)}); };
  const Tensor y = complex(times(0, 0) - times(1, 1), times(0, 1) + times(1, 0));
  return transpose(y, axis, y.dim() - 2) / (inverse ? static_cast<double>(n) : 1.0);
}

Tensor as_complex(const Tensor& x) { return complex(x, zeros_like(x)); }

// The relative error of a transform grows with log n.
double tolerance_of(DType dtype) { return dtype == float64 ? 1e-13 : 2e-5; }

void expect_near(const Tensor& got, const Tensor& expected) {
  ASSERT_EQ(got.shape(), expected.shape());
  const std::vector<double> sizes = row_sizes(to_vector<double>(expected), expected.numel());
  expect_close(got, expected, 0, tolerance_of(got.dtype()) * std::max(sizes[0], 1e-3));
}

// Powers of 2, of other primes and mixed; primes above 64, where the CPU uses Bluestein's algorithm.
const std::vector<std::int64_t> kLengths{1,  2,  3,  4,  5,  6,   7,   8,   9,   12, 15,
                                         16, 30, 49, 64, 67, 100, 127, 134, 201, 256};

TEST(Fft, MatchesItsDefinition) {
  manual_seed(1);
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32}) {
      for (const std::int64_t n : kLengths) {
        SCOPED_TRACE(fmt::format("{} {} {}", device, dtype, n));
        for (const int axis : {0, 1}) {
          const Tensor x = randn(axis == 0 ? Shape{n, 11, 2} : Shape{3, n, 2}, dtype, device);
          expect_near(fft(x, {.axis = axis}), reference(x, axis, false));
          expect_near(ifft(x, {.axis = axis}), reference(x, axis, true));
          const Tensor real = select(x, -1, 0);
          const Tensor half = rfft(real, {.axis = axis});
          expect_near(half, slice(reference(as_complex(real), axis, false), axis, 0, n / 2 + 1));
          expect_near(irfft(half, {.n = n, .axis = axis}), real);
        }
      }
    }
  }
}

TEST(Fft, LongLengths) {
  manual_seed(2);
  for (const Device device : test_devices()) {
    for (const std::int64_t n : {4096, 10007, 65536, 100000}) {
      const Tensor x = randn({2, n, 2}, float32, device);
      expect_near(ifft(fft(x)), x);
      // Parseval's equation.
      EXPECT_NEAR(vector_norm(fft(x, {.norm = FftNorm::ortho})).item() / vector_norm(x).item(), 1, 1e-5);
      // A shift multiplies by phases.
      const Tensor delayed = fft(roll(x, 1, 1));
      const Tensor turn =
          -2 * std::numbers::pi / static_cast<double>(n) * arange(static_cast<double>(n), float64, device);
      expect_near(delayed, complex_mul(fft(x), complex(cos(turn), sin(turn)).to(float32)));
    }
  }
}

TEST(Fft, LengthsAxesAndNorms) {
  manual_seed(3);
  for (const Device device : test_devices()) {
    const Tensor x = randn({3, 4, 5, 2}, float64, device);
    expect_near(fft(x, {.n = 3}), fft(slice(x, 2, 0, 3)));
    expect_near(fft(x, {.n = 7, .axis = 1}), fft(pad(x, 1, 0, 3), {.axis = 1}));
    const Tensor real = select(x, -1, 1);
    expect_near(rfft(real, {.n = 9}), rfft(pad(real, -1, 0, 4)));
    expect_near(irfft(x), irfft(x, {.n = 8}));
    expect_near(irfft(x, {.n = 12}), irfft(pad(x, 2, 0, 2), {.n = 12}));
    expect_near(irfft(x, {.n = 3}), irfft(slice(x, 2, 0, 2), {.n = 3}));
    for (const auto& [norm, forward, inverse] :
         {std::tuple{FftNorm::backward, 1.0, 0.2}, std::tuple{FftNorm::ortho, std::sqrt(0.2), std::sqrt(0.2)},
          std::tuple{FftNorm::forward, 0.2, 1.0}}) {
      expect_near(fft(x, {.norm = norm}), forward * fft(x));
      expect_near(ifft(x, {.norm = norm}), 5 * inverse * ifft(x));
      expect_near(rfft(real, {.norm = norm}), forward * rfft(real));
      expect_near(irfft(rfft(real, {.norm = norm}), {.n = 5, .norm = norm}), real);
    }
    // A view with gaps, and one whose first element is not aligned to a complex number.
    const Tensor gaps = select(randn({3, 6, 2, 3}, float64, device), -1, 1);
    expect_near(fft(gaps), fft(contiguous(gaps)));
    const Tensor shifted = slice(randn({9}, float32, device), 0, 1, 9);
    expect_near(rfft(shifted), rfft(clone(shifted)));
    expect_near(fft(view(shifted, {4, 2})), fft(clone(view(shifted, {4, 2}))));
    EXPECT_EQ(fft(zeros({0, 3, 2}, float32, device)).shape(), (Shape{0, 3, 2}));
    EXPECT_EQ(rfft2(zeros({0, 3, 4}, float32, device)).shape(), (Shape{0, 3, 3, 2}));
  }
}

TEST(Fft, IrfftIgnoresImaginaryPartsOfTheEnds) {
  manual_seed(4);
  for (const Device device : test_devices()) {
    for (const std::int64_t n : {1, 2, 7, 8, 134}) {
      const Tensor x = randn({2, n / 2 + 1, 2}, float64, device);
      Tensor mask = ones({n / 2 + 1, 2}, float64, device);
      fill_(select(select(mask, 0, 0), 0, 1), 0);
      if (n % 2 == 0) {
        fill_(select(select(mask, 0, n / 2), 0, 1), 0);
      }
      expect_near(irfft(x, {.n = n}), irfft(x * mask, {.n = n}));
    }
  }
}

TEST(Fft, SeveralAxes) {
  manual_seed(5);
  for (const Device device : test_devices()) {
    const Tensor x = randn({2, 4, 5, 3, 2}, float64, device);
    expect_near(fft2(x), fft(fft(x, {.axis = 2}), {.axis = 3}));
    expect_near(ifft2(fft2(x, {.axes = {0, -2}}), {.axes = {0, -2}}), x);
    expect_near(ifft2(fft2(x, {.axes = {0, 1, 2, 3}}), {.axes = {3, 2, 1, 0}}), x);
    const Tensor real = select(x, -1, 0);
    expect_near(rfft2(real), slice(fft2(as_complex(real)), 3, 0, 2));
    expect_near(irfft2(rfft2(real), {.lengths = {5, 3}}), real);
    expect_near(irfft2(rfft2(real, {.axes = {2, 1}, .norm = FftNorm::ortho}), {.axes = {2, 1}, .norm = FftNorm::ortho}),
                real);
    expect_near(fft2(x, {.lengths = {3, 4}}), fft2(pad(slice(x, 2, 0, 3), 3, 0, 1)));
  }
}

TEST(Fft, FirstAndSecondDerivatives) {
  manual_seed(6);
  for (const Device device : test_devices()) {
    for (const std::int64_t n : {4, 5}) {
      const std::vector<std::pair<Shape, std::function<Tensor(const Tensor&)>>> cases{
          {{2, n, 2}, [](const Tensor& x) { return fft(x * x); }},
          {{n, 2, 2}, [](const Tensor& x) { return ifft(x * x, {.n = 3, .axis = 0, .norm = FftNorm::ortho}); }},
          {{2, n}, [](const Tensor& x) { return rfft(x * x); }},
          {{n, 2}, [](const Tensor& x) { return rfft(x * x, {.axis = 0, .norm = FftNorm::forward}); }},
          {{2, n, 2}, [](const Tensor& x) { return irfft(x * x); }},
          {{2, 3, 2}, [n](const Tensor& x) { return irfft(x * x, {.n = n, .norm = FftNorm::forward}); }},
          {{n, 3, 2}, [](const Tensor& x) { return irfft(x * x, {.axis = 0, .norm = FftNorm::ortho}); }},
          {{2, n}, [](const Tensor& x) { return rfft2(x * x, {.norm = FftNorm::ortho}); }},
          {{n, 3, 2},
           [](const Tensor& x) {
             return irfft2(x * x, {.lengths = {x.size(0), 5}});
           }},
          {{n, 2}, [](const Tensor& x) { return complex_mul(x, complex_conj(x) + 1); }},
          {{n, 2}, [](const Tensor& x) { return complex_abs(x); }},
      };
      for (std::size_t i = 0; i < cases.size(); ++i) {
        SCOPED_TRACE(fmt::format("{} length {}, case {}", device, n, i));
        const Tensor x = randn(cases[i].first, float64, device);
        EXPECT_TRUE(gradcheck(cases[i].second, {x}));
        EXPECT_TRUE(gradgradcheck(cases[i].second, {x}));
      }
    }
  }
}

TEST(Fft, FrequenciesAndShifts) {
  expect_close(fftfreq(4), Values{0, 0.25, -0.5, -0.25}, 0, 0);
  expect_close(fftfreq(5, 0.1, float64), Values{0, 2, 4, -4, -2}, 1e-15, 0);
  expect_close(rfftfreq(4, 0.5), Values{0, 0.5, 1}, 0, 0);
  expect_close(rfftfreq(5), Values{0, 0.2, 0.4}, 1e-7, 0);
  EXPECT_EQ(fftfreq(3, 1, bfloat16).dtype(), bfloat16);
  for (const Device device : test_devices()) {
    const Tensor x = reshape(arange(15, int64, device), {3, 5});
    expect_close(fftshift(arange(5, int64, device)), Values{3, 4, 0, 1, 2}, 0, 0);
    expect_close(ifftshift(arange(5, int64, device)), Values{2, 3, 4, 0, 1}, 0, 0);
    expect_close(ifftshift(fftshift(x)), x, 0, 0);
    expect_close(fftshift(x, {1}), roll(x, 2, 1), 0, 0);
    expect_close(fftshift(fftfreq(5, 1, float64, device)), Values{-0.4, -0.2, 0, 0.2, 0.4}, 1e-15, 0);
  }
}

TEST(Fft, ComplexFunctions) {
  const Tensor a = from_data<double>({1., 2., 3., -4.}, {2, 2}), b = from_data<double>({0., 1.});
  expect_close(complex_mul(a, b), from_data<double>({-2., 1., 4., 3.}, {2, 2}), 0, 0);
  expect_close(complex_conj(a), from_data<double>({1., -2., 3., 4.}, {2, 2}), 0, 0);
  expect_close(complex_abs(a), Values{std::sqrt(5.0), 5}, 1e-15, 0);
  expect_close(complex(from_data<double>({1., 3.}), from_data<double>({2., -4.})), a, 0, 0);
}

TEST(Fft, SameBitsEachTimeAndAutocast) {
  manual_seed(7);
  for (const Device device : test_devices()) {
    const Tensor x = randn({40, 60, 2}, float32, device);
    const Tensor expected = fft2(x, {.axes = {0, 1}});
    expect_same_bits(fft2(x, {.axes = {0, 1}}), expected);
    const autograd::Autocast guard(bfloat16);
    EXPECT_EQ(fft(x.to(bfloat16)).dtype(), float32);
  }
}

// The captured transform's plan, which owns tables on the device, stays although others replace it in the cache.
TEST(Fft, IsCaptured) {
  if (!cuda_available()) {
    GTEST_SKIP() << "there is no GPU";
  }
  manual_seed(8);
  const Tensor x = randn({3, 50}, float32, Device::cuda());
  Tensor y;
  const cuda::Graph graph = cuda::capture([&] {
    const Tensor leaf = x.detach().requires_grad_();
    y = autograd::grad({irfft(rfft(leaf) * 2, {.n = 50})}, {leaf}, {x})[0];
  });
  for (std::int64_t n = 2; n < 80; ++n) {
    rfft(x, {.n = n});
  }
  graph.replay();
  expect_near(y, 2 * x);
}

TEST(Fft, Errors) {
  const Tensor real = ones({3, 4}), z = ones({3, 4, 2});
  expect_error([&] { fft(real); }, "fft: expected a complex tensor, with a last axis of length 2, got shape [3, 4]");
  expect_error([&] { fft(ones({2})); }, "fft: expected a complex tensor");
  expect_error([&] { rfft(scalar(1)); }, "rfft: expected a tensor with at least one axis");
  expect_error([&] { fft(z.to(float16)); }, "fft: expected float64 or float32, got float16");
  expect_error([&] { irfft(z.to(int64)); }, "irfft: expected float64 or float32, got int64");
  expect_error([&] { fft(z, {.axis = 2}); }, "fft: ");
  expect_error([&] { ifft(z, {.n = 0}); }, "ifft: expected lengths of at least 1, got [0]");
  expect_error([&] { fft(zeros({0, 2})); }, "fft: expected lengths of at least 1, got [0]");
  expect_error([&] { irfft(ones({1, 2})); }, "irfft: expected lengths of at least 1, got [0]");
  expect_error([&] { fft2(z, {.axes = {0, -2}}); }, "fft2: expected different axes, got [0, -2]");
  expect_error([&] { rfft2(real, {.lengths = {3}}); }, "rfft2: expected at least one axis and a length for each");
  expect_error([&] { irfft2(z, {.axes = {}}); }, "irfft2: expected at least one axis");
  expect_error([&] { fftfreq(0); }, "fftfreq: expected n of at least 1");
  expect_error([&] { rfftfreq(3, 0); }, "rfftfreq: expected n of at least 1 and a spacing other than 0, got 3 and 0");
  expect_error([&] { fftfreq(3, 1, int64); }, "fftfreq: expected a floating dtype, got int64");
  expect_error([&] { fftshift(real, {2}); }, "fftshift: ");
  expect_error([&] { complex(real, z); }, "complex: expected equal shapes");
  expect_error([&] { complex_mul(real, z); }, "complex_mul: expected a complex tensor");
  expect_error([&] { complex_abs(scalar(1)); }, "complex_abs: expected a complex tensor");
}

}  // namespace fft_test

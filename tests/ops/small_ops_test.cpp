// Element-wise functions that have no kernels for their gradients, and ops that are composed of others. The conformance
// tests compare them with PyTorch; here are their gradients, their edges, large inputs, and their errors.

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <vector>

#include "tests/support.h"
#include <mica/autograd/gradcheck.h>
#include <mica/core/creation.h>
#include <mica/core/rng.h>
#include <mica/mica.h>

using namespace mica;
using namespace mica::testing_support;

namespace small_ops_test {

using Values = std::vector<double>;
using Ints = std::vector<std::int64_t>;
constexpr double kInfinity = INFINITY;

Tensor uniform(const Shape& shape, double low, double high, Device device) {
  return rand(shape, float64, device) * (high - low) + low;
}

TEST(Trigonometric, ValuesAndGradients) {
  struct Case {
    const char* name;
    Tensor (*f)(const Tensor&);
    double (*reference)(double);
    double low, high;
  };
  const Case cases[] = {{"tan", tan, std::tan, -1.4, 1.4},        {"asin", asin, std::asin, -0.95, 0.95},
                        {"acos", acos, std::acos, -0.95, 0.95},   {"atan", atan, std::atan, -5, 5},
                        {"sinh", sinh, std::sinh, -3, 3},         {"cosh", cosh, std::cosh, -3, 3},
                        {"asinh", asinh, std::asinh, -5, 5},      {"acosh", acosh, std::acosh, 1.05, 6},
                        {"atanh", atanh, std::atanh, -0.95, 0.95}};
  manual_seed(1);
  for (const Device device : test_devices()) {
    for (const Case& c : cases) {
      for (const DType dtype : {float64, float32, float16, bfloat16}) {
        SCOPED_TRACE(fmt::format("{} {} {}", c.name, dtype, device));
        const Tensor x = uniform({7, 37}, c.low, c.high, device).to(dtype);
        Values expected = to_vector<double>(x);
        for (double& value : expected) {
          value = c.reference(value);
        }
        const double tolerance = dtype == float64 ? 1e-14 : dtype == float32 ? 1e-6 : dtype == float16 ? 1e-3 : 8e-3;
        expect_close(c.f(x), expected, tolerance, tolerance);
      }
      const Tensor x = uniform({5}, c.low, c.high, device);
      EXPECT_TRUE(autograd::gradcheck(c.f, {x})) << c.name;
      EXPECT_TRUE(autograd::gradgradcheck(c.f, {x})) << c.name;
      expect_error([&] { c.f(arange(3, int64, device)); }, std::string(c.name) + ": ");
    }
    // The gradient of a 16-bit float near the end of the domain is computed in float32.
    const Tensor near = full({1}, 0.99609375, bfloat16, device).requires_grad_();
    asin(near).backward();
    expect_close(near.grad(), Values{1 / std::sqrt(1 - 0.99609375 * 0.99609375)}, 4e-3, 0);
  }
}

TEST(Trigonometric, Atan2InAllQuadrants) {
  manual_seed(2);
  for (const Device device : test_devices()) {
    const Tensor y = randn({3, 1}, float64, device), x = randn({4}, float64, device);
    const auto f = [](const Tensor& a, const Tensor& b) { return atan2(a, b); };
    EXPECT_TRUE(autograd::gradcheck(f, {y, x}));
    EXPECT_TRUE(autograd::gradgradcheck(f, {y, x}));
    expect_close(atan2(from_data({1.0, 1.0, -1.0, -1.0, 0.0, -0.0}, device),
                       from_data({1.0, -1.0, -1.0, 1.0, -1.0, -1.0}, device)),
                 Values{M_PI_4, 3 * M_PI_4, -3 * M_PI_4, -M_PI_4, M_PI, -M_PI}, 1e-15, 0);
    expect_error([&] { atan2(y, x.to(float32)); }, "atan2: expected tensors of one dtype");
  }
}

TEST(Rounding, SignTruncFrac) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, float16, bfloat16}) {
      const Tensor x =
          from_data({-2.5, -0.0, 0.0, 1.75, kInfinity, -kInfinity, NAN}).to(device, dtype).requires_grad_();
      expect_close(sign(x), Values{-1, 0, 0, 1, 1, -1, 0}, 0, 0);
      expect_close(trunc(x), Values{-2, 0, 0, 1, kInfinity, -kInfinity, NAN}, 0, 0);
      expect_close(frac(x), Values{-0.5, 0, 0, 0.75, NAN, NAN, NAN}, 0, 0);
      (sign(x) + trunc(x) + frac(x)).backward(ones_like(x));
      expect_close(x.grad(), Values{1, 1, 1, 1, 1, 1, 1}, 0, 0);
    }
    expect_close(sign(from_data<std::int64_t>({INT64_MIN, 0, 7}, device)), Values{-1, 0, 1}, 0, 0);
    expect_close(sign(from_data<std::uint8_t>({0, 255}, device)), Values{0, 1}, 0, 0);
    expect_error([&] { sign(ones({1}, boolean, device)); }, "sign: ");
    expect_error([&] { frac(ones({1}, int64, device)); }, "frac: ");
  }
}

TEST(Bitwise, NumbersTensorsAndLargeShifts) {
  for (const Device device : test_devices()) {
    const Tensor a = from_data<std::int64_t>({-1, 5, INT64_MIN, 12}, device);
    EXPECT_EQ(to_vector<std::int64_t>(bitwise_and(a, 6)), (Ints{6, 4, 0, 4}));
    EXPECT_EQ(to_vector<std::int64_t>(bitwise_or(a, from_data<std::int64_t>({8}, device))),
              (Ints{-1, 13, INT64_MIN + 8, 12}));
    EXPECT_EQ(to_vector<std::int64_t>(bitwise_xor(a, 1)), (Ints{-2, 4, INT64_MIN + 1, 13}));
    EXPECT_EQ(to_vector<std::int64_t>(bitwise_not(a)), (Ints{0, -6, INT64_MAX, -13}));
    const Tensor by = from_data<std::int64_t>({1, 63, 64, -1}, device);
    EXPECT_EQ(to_vector<std::int64_t>(bitwise_left_shift(a, by)), (Ints{-2, INT64_MIN, 0, 0}));
    EXPECT_EQ(to_vector<std::int64_t>(bitwise_right_shift(a, by)), (Ints{-1, 0, -1, 0}));
    const Tensor bytes = from_data<std::uint8_t>({255, 129, 1}, device);
    expect_close(bitwise_left_shift(bytes, 1), Values{254, 2, 2}, 0, 0);
    expect_close(bitwise_right_shift(bytes, 7), Values{1, 1, 0}, 0, 0);
    expect_close(bitwise_right_shift(bytes, 8), Values{0, 0, 0}, 0, 0);
    const Tensor small = from_data<std::int32_t>({-8, 1}, device);
    expect_close(bitwise_right_shift(small, 40), Values{-1, 0}, 0, 0);
    expect_close(bitwise_left_shift(small, 31), Values{0, -0x1p31}, 0, 0);
    const Tensor flags = from_data({true, false}, device);
    expect_close(bitwise_xor(flags, ones({2}, boolean, device)), Values{0, 1}, 0, 0);
    expect_close(bitwise_not(flags), Values{0, 1}, 0, 0);
    expect_error([&] { bitwise_and(ones({1}, float32, device), 1); }, "bitwise_and: ");
    expect_error([&] { bitwise_left_shift(flags, flags); }, "bitwise_left_shift: ");
    expect_error([&] { bitwise_or(bytes, 300); }, "bitwise_or: ");
  }
}

TEST(Between, ClampWithTensors) {
  for (const Device device : test_devices()) {
    const Tensor x = from_data({-2.0, 0.0, 1.0, 3.0, 1.0, NAN, 1.0}, device).requires_grad_();
    const Tensor low = from_data({-1.0, 0.0, 0.0, 0.0, 4.0, 0.0, NAN}, device).requires_grad_();
    const Tensor high = from_data({2.0, 2.0, 1.0, 2.0, 2.0, 1.0, 2.0}, device).requires_grad_();
    const Tensor y = clamp(x, low, high);
    expect_close(y, Values{-1, 0, 1, 2, 2, NAN, NAN}, 0, 0);
    y.backward(ones_like(y));
    expect_close(x.grad(), Values{0, 1, 1, 0, 0, 1, 0}, 0, 0);
    expect_close(low.grad(), Values{1, 0, 0, 0, 0, 0, 1}, 0, 0);
    expect_close(high.grad(), Values{0, 0, 0, 1, 1, 0, 0}, 0, 0);
    expect_close(clamp(from_data<std::int64_t>({1, 5}, device), Tensor{}, full({}, 3, int64, device)), Values{1, 3}, 0,
                 0);
    expect_error([&] { clamp(x, Tensor{}, Tensor{}); }, "clamp: expected at least one bound");
  }
}

TEST(Between, Lerp) {
  manual_seed(3);
  for (const Device device : test_devices()) {
    const Tensor a = randn({3, 1}, float64, device), b = randn({4}, float64, device);
    const Tensor w = from_data({0.1, 0.5, 0.9, 1.5}, device);
    const auto f = [](const Tensor& p, const Tensor& q, const Tensor& weight) { return lerp(p, q, weight); };
    EXPECT_TRUE(autograd::gradcheck(f, {a, b, w}));
    EXPECT_TRUE(autograd::gradgradcheck(f, {a, b, w}));
    expect_close(lerp(a, b, w), a * (1 - w) + b * w, 1e-14, 1e-14);
    for (const DType dtype : {float32, bfloat16}) {
      const Tensor p = randn({50}, dtype, device), q = randn({50}, dtype, device) * 1e4;
      expect_close(lerp(p, q, 1.0), q, 0, 0);
      expect_close(lerp(p, q, 0.0), p, 0, 0);
      expect_close(lerp(p, q, ones_like(p)), q, 0, 0);
    }
    expect_error([&] { lerp(a, b.to(float32), 0.5); }, "lerp: ");
  }
}

TEST(Close, InfinitiesNanAndInt64) {
  for (const Device device : test_devices()) {
    const Tensor a = from_data({1.0, kInfinity, kInfinity, NAN, 0.0, 1.0}, device);
    const Tensor b = from_data({1.0 + 9e-6, kInfinity, -kInfinity, NAN, 1e-9, 1.1}, device);
    expect_close(isclose(a, b), Values{1, 1, 0, 0, 1, 0}, 0, 0);
    expect_close(isclose(a, b, {.equal_nan = true}), Values{1, 1, 0, 1, 1, 0}, 0, 0);
    expect_close(isclose(a, full({}, kInfinity, float64, device)), Values{0, 1, 1, 0, 0, 0}, 0, 0);
    EXPECT_FALSE(allclose(a, a));
    EXPECT_TRUE(allclose(a, a, {.equal_nan = true}));
    EXPECT_FALSE(equal(a, a));
    EXPECT_TRUE(equal(slice(a, 0, 0, 3), slice(clone(a), 0, 0, 3)));
    EXPECT_FALSE(equal(slice(a, 0, 0, 3), reshape(slice(a, 0, 0, 3), {1, 3})));
    EXPECT_TRUE(equal(empty({0}, float32, device), empty({0}, float32, device)));
    const Tensor large = from_data<std::int64_t>({(std::int64_t{1} << 60) + 1}, device);
    EXPECT_FALSE(equal(large, large - 1));
    EXPECT_TRUE(allclose(large, large, {.rtol = 0, .atol = 0}));
    expect_error([&] { equal(a, a.to(float32)); }, "equal: ");
    expect_error([&] { isclose(a, a, {.rtol = -1}); }, "isclose: ");
  }
}

TEST(Grid, LinspaceEyeMeshgrid) {
  for (const Device device : test_devices()) {
    expect_close(linspace(0, 1, 5, float32, device), Values{0, 0.25, 0.5, 0.75, 1}, 0, 0);
    expect_close(linspace(1, -1, 3, int64, device), Values{1, 0, -1}, 0, 0);
    expect_close(linspace(2, 7, 1, float64, device), Values{2}, 0, 0);
    EXPECT_EQ(linspace(0, 1, 0, float64, device).shape(), Shape{0});
    EXPECT_EQ(linspace(0.1, 0.7, 1001, float64).data<double>()[1000], 0.7);
    expect_close(logspace(0, 3, 4, 10, float64, device), Values{1, 10, 100, 1000}, 1e-15, 0);
    expect_close(eye(2, 3, bfloat16, device), Values{1, 0, 0, 0, 1, 0}, 0, 0);
    EXPECT_EQ(eye(0, float32, device).shape(), (Shape{0, 0}));
    const Tensors grids = meshgrid({arange(2, int64, device), arange(3, int64, device)});
    expect_close(grids[0] * 10 + grids[1], Values{0, 1, 2, 10, 11, 12}, 0, 0);
    expect_error([&] { linspace(0, INFINITY, 3); }, "linspace: ");
    expect_error([&] { linspace(-1, 1, 3, uint8); }, "linspace: ");
    expect_error([&] { logspace(0, 1, 3, -2, int64); }, "logspace: expected a base above 0");
    expect_error([&] { eye(-1); }, "eye: ");
    expect_error([&] { meshgrid({ones({2, 2})}); }, "meshgrid: ");
  }
}

TEST(Diagonal, IsAViewAndDifferentiable) {
  manual_seed(4);
  for (const Device device : test_devices()) {
    const Tensor x = randn({3, 2, 4}, float64, device);
    for (const std::int64_t offset : {-5, -1, 0, 1, 2, 9}) {
      const auto f = [&](const Tensor& t) { return diagonal(t * t, offset, 2, 0); };
      EXPECT_TRUE(autograd::gradcheck(f, {x})) << offset;
      EXPECT_TRUE(autograd::gradgradcheck(f, {x})) << offset;
    }
    const auto embed = [&](const Tensor& t) { return diag_embed(t * t, -2); };
    EXPECT_TRUE(autograd::gradgradcheck(embed, {x}));
    const Tensor matrix = zeros({3, 4}, float64, device);
    fill_(diagonal(matrix, 1), 7);
    expect_close(matrix, Values{0, 7, 0, 0, 0, 0, 7, 0, 0, 0, 0, 7}, 0, 0);
    EXPECT_EQ(trace(ones({3, 5}, int32, device)).item(), 3);
    expect_close(diag(from_data({1.0, 2.0}, device), 1), Values{0, 1, 0, 0, 0, 2, 0, 0, 0}, 0, 0);
    // A write to the view is part of the history.
    const Tensor leaf = randn({2, 2}, float64, device).requires_grad_();
    const Tensor whole = leaf * 1;
    mul_(diagonal(whole), 3);
    sum(whole).backward();
    expect_close(leaf.grad(), Values{3, 1, 1, 3}, 0, 0);
    expect_error([&] { diagonal(x, 0, 1, 1); }, "diagonal: expected two different axes");
    expect_error([&] { trace(x); }, "trace: ");
    expect_error([&] { diag(x); }, "diag: ");
  }
}

TEST(Distance, Gradients) {
  manual_seed(5);
  for (const Device device : test_devices()) {
    const Tensor x = randn({2, 3, 4}, float64, device), y = randn({2, 5, 4}, float64, device);
    for (const double p : {1.0, 2.0, 3.0, kInfinity}) {
      const auto f = [&](const Tensor& a, const Tensor& b) { return cdist(a, b, p); };
      EXPECT_TRUE(autograd::gradcheck(f, {x, y})) << p;
      EXPECT_TRUE(autograd::gradgradcheck(f, {x, y})) << p;
    }
    const auto normal = [&](const Tensor& a) { return normalize(a, 2, -1); };
    EXPECT_TRUE(autograd::gradgradcheck(normal, {x}));
    const Tensor z = randn({2, 3, 4}, float64, device);
    const auto cosine = [&](const Tensor& a, const Tensor& b) { return cosine_similarity(a, b, -1); };
    EXPECT_TRUE(autograd::gradcheck(cosine, {x, z}));
    EXPECT_TRUE(autograd::gradgradcheck(cosine, {x, z}));
    // At a distance of 0, the gradient is 0.
    const Tensor same = x.detach().requires_grad_();
    sum(cdist(same, x)).backward();
    EXPECT_TRUE(std::isfinite(sum(same.grad()).item()));
    const Tensor zero = zeros({1, 3}, float32, device).requires_grad_();
    sum(normalize(zero)).backward();
    expect_close(zero.grad(), Values{1e12, 1e12, 1e12}, 1e-6, 0);
    expect_error([&] { cdist(x, ones({2, 5, 3}, float64, device)); }, "cdist: ");
    expect_error([&] { cdist(x, y, -1); }, "cdist: expected p");
    expect_error([&] { pairwise_distance(x, y.to(float32)); }, "pairwise_distance: ");
  }
}

// From a matrix product, with a large offset that all rows share.
TEST(Distance, ManyRows) {
  manual_seed(6);
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, bfloat16}) {
      const Tensor x = (randn({40, 7}, float64, device) + (dtype == bfloat16 ? 0 : 1000)).to(dtype);
      const Tensor y = (randn({30, 7}, float64, device) + (dtype == bfloat16 ? 0 : 1000)).to(dtype);
      const Tensor wide_x = x.to(float64), wide_y = y.to(float64);
      const Tensor expected = vector_norm(unsqueeze(wide_x, 1) - wide_y, {-1});
      const double tolerance = dtype == float64 ? 1e-12 : dtype == float32 ? 1e-5 : 8e-3;
      expect_close(cdist(x, y), expected, tolerance, tolerance);
    }
    const Tensor a = randn({26, 2}, float64, device), b = randn({1, 2}, float64, device);
    const auto f = [](const Tensor& p, const Tensor& q) { return cdist(p, q); };
    EXPECT_TRUE(autograd::gradcheck(f, {a, b}));
    EXPECT_TRUE(autograd::gradgradcheck(f, {a, b}));
  }
}

TEST(IntegerMatmul, WrapsBroadcastsAndTakesAllShapes) {
  manual_seed(7);
  for (const Device device : test_devices()) {
    for (const DType dtype : {int64, int32, uint8}) {
      for (const auto& [m, k, n] : {std::array<std::int64_t, 3>{1, 1, 1}, {17, 33, 18}, {3, 0, 2}, {40, 5, 70}}) {
        const Tensor a = randint(0, 10, {2, 1, m, k}, dtype, device), b = randint(0, 10, {3, k, n}, dtype, device);
        const Tensor exact = matmul(a.to(float64), b.to(float64));
        const Tensor y = matmul(a, b);
        EXPECT_EQ(y.dtype(), dtype);
        expect_close(y, dtype == uint8 ? fmod(exact, 256) : exact, 0, 0);
      }
    }
    const Tensor large = from_data<std::int64_t>({INT64_MAX, 2}, device);
    EXPECT_EQ(to_vector<std::int64_t>(matmul(large, from_data<std::int64_t>({2, 1}, device))), Ints{0});
    const Tensor square = randint(-5, 5, {20, 20}, int32, device);
    expect_close(matmul(transpose(square, 0, 1), square),
                 matmul(transpose(square.to(float64), 0, 1), square.to(float64)), 0, 0);
    expect_error([&] { matmul(ones({2, 2}, boolean, device), ones({2, 2}, boolean, device)); }, "matmul: ");
  }
}

}  // namespace small_ops_test

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "tests/rows_close.h"
#include "tests/support.h"
#include <mica/autograd/autocast.h>
#include <mica/autograd/function.h>
#include <mica/autograd/gradcheck.h>
#include <mica/core/creation.h>
#include <mica/core/rng.h>
#include <mica/ops/diagonal/diagonal.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/inplace/inplace.h>
#include <mica/ops/linalg/linalg.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/tril/tril.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;
using autograd::gradcheck;
using autograd::gradgradcheck;

namespace linalg_test {

using Values = std::vector<double>;

Tensor mt(const Tensor& x) { return transpose(x, -1, -2); }

Tensor eye(const Shape& batch, std::int64_t n, DType dtype, Device device) {
  Shape shape = batch;
  shape.push_back(n);
  return diag_embed(ones(shape, dtype, device));
}

// Symmetric positive definite; its condition number is small.
Tensor definite(const Tensor& x) {
  const std::int64_t n = x.size(-1);
  return matmul(x, mt(x)) / static_cast<double>(n) + eye({}, n, x.dtype(), x.device());
}

Tensor shifted(const Tensor& x, double by = 3) { return x + by * eye({}, x.size(-1), x.dtype(), x.device()); }

// Leading axes, and the number of rows. On CUDA, batches of matrices up to 32 (Jacobi) and 256 rows use other
// functions than single and larger ones.
struct Size {
  Shape batch;
  std::int64_t n;
};
const std::vector<Size> kSizes{{{}, 1}, {{}, 5}, {{2, 3}, 4}, {{3}, 37}, {{}, 70}, {{0}, 3}, {{2}, 0}};
// The errors of a float64 and float32 result.
double tolerance_of(DType dtype) { return dtype == float64 ? 1e-11 : 1e-3; }

Tensor random(const Size& size, std::int64_t columns, DType dtype, Device device) {
  Shape shape = size.batch;
  shape.push_back(size.n);
  shape.push_back(columns);
  return randn(shape, dtype, device);
}

// For each device, dtype and size.
void for_each_case(const std::function<void(const Size&, DType, Device, double)>& f) {
  manual_seed(1);
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32}) {
      for (const Size& size : kSizes) {
        SCOPED_TRACE(fmt::format("{} {} {} x {}", device, dtype, size.batch, size.n));
        f(size, dtype, device, tolerance_of(dtype));
      }
    }
  }
}

void expect_orthonormal(const Tensor& q, double tolerance) {
  expect_close(matmul(mt(q), q), eye(q.shape().slice(0, q.dim() - 2), q.size(-1), q.dtype(), q.device()), tolerance,
               tolerance);
}

TEST(Linalg, SolveInvDet) {
  for_each_case([](const Size& size, DType dtype, Device device, double tolerance) {
    const Tensor a = shifted(random(size, size.n, dtype, device), 2 * std::sqrt(size.n + 1.0));
    const Tensor x = random(size, 3, dtype, device);
    expect_close(solve(a, matmul(a, x)), x, tolerance, tolerance);
    expect_close(matmul(a, inv(a)), eye(size.batch, size.n, dtype, device), tolerance, tolerance);
    // A transposed operand, and vectors.
    const Tensor v = select(x, -1, 0);
    expect_close(solve(mt(a), squeeze(matmul(mt(a), unsqueeze(v, -1)), -1)), v, tolerance, tolerance);
    const SlogdetResult log = slogdet(a);
    expect_close(log.sign, ones_like(log.sign), 0, 0);
    expect_close(log.logabsdet, sum(mica::log(abs(diagonal(qr(a).r, 0, -2, -1))), {-1}), tolerance, tolerance);
    if (size.n <= 5) {  // larger ones overflow float32
      expect_close(det(a) / exp(log.logabsdet), ones_like(log.logabsdet), tolerance, tolerance);
    }
  });
}

TEST(Linalg, DeterminantsOfPermutations) {
  for (const Device device : test_devices()) {
    const Tensor swaps = from_data<double>({0., 1., 0., 0., 0., 1., 1., 0., 0.,  // a cycle of three: even
                                            0., 1., 0., 1., 0., 0., 0., 0., -2.},
                                           {2, 3, 3}, device);
    expect_close(det(swaps), Values{1, 2}, 0, 0);
    expect_close(slogdet(swaps).sign, Values{1, 1}, 0, 0);
    expect_close(slogdet(neg(swaps)).sign, Values{-1, -1}, 0, 0);
    const SlogdetResult zero = slogdet(zeros({2, 2}, float64, device));
    expect_close(zero.sign, Values{0}, 0, 0);
    expect_close(zero.logabsdet, Values{-INFINITY}, 0, 0);
    expect_close(slogdet(full({1, 1}, NAN, float64, device)).sign, Values{NAN}, 0, 0);
    expect_close(det(zeros({2, 0, 0}, float64, device)), Values{1, 1}, 0, 0);
  }
}

TEST(Linalg, Broadcasting) {
  manual_seed(2);
  for (const Device device : test_devices()) {
    const Tensor a = shifted(randn({2, 1, 3, 3}, float64, device));
    const Tensor b = randn({4, 3, 2}, float64, device);
    expect_close(matmul(a, solve(a, b)), expand(b, {2, 4, 3, 2}), 1e-12, 1e-12);
    const Tensor one = select(select(a, 0, 0), 0, 0);
    expect_close(matmul(one, solve(one, b)), b, 1e-12, 1e-12);
    const Tensor many = randn({2, 4, 3, 2}, float64, device);
    expect_close(matmul(one, solve(one, many)), many, 1e-12, 1e-12);
    expect_close(matmul(tril(a), solve_triangular(a, b, {})), expand(b, {2, 4, 3, 2}), 1e-11, 1e-11);
    expect_close(matmul(a, lstsq(a, b)), expand(b, {2, 4, 3, 2}), 1e-12, 1e-12);
    EXPECT_TRUE(gradgradcheck([](const Tensor& x, const Tensor& y) { return solve(x, y); },
                              {select(a, 1, 0), slice(b, 0, 0, 2)}));
    EXPECT_TRUE(gradcheck([](const Tensor& x, const Tensor& y) { return solve(x, y); }, {one, b}));
  }
}

TEST(Linalg, Cholesky) {
  for_each_case([](const Size& size, DType dtype, Device device, double tolerance) {
    const Tensor a = definite(random(size, size.n, dtype, device));
    const Tensor l = cholesky(a);
    expect_close(l, tril(l), 0, 0);
    expect_close(matmul(l, mt(l)), a, tolerance, tolerance);
    // Only one triangle is read.
    expect_close(cholesky(tril(a)), l, tolerance, tolerance);
    const Tensor u = cholesky(triu(a), true);
    expect_close(u, mt(l), tolerance, tolerance);
    const Tensor x = random(size, 2, dtype, device);
    expect_close(cholesky_solve(matmul(a, x), l), x, tolerance, tolerance);
    expect_close(cholesky_solve(matmul(a, x), u, true), x, tolerance, tolerance);
  });
}

TEST(Linalg, SolveTriangular) {
  for_each_case([](const Size& size, DType dtype, Device device, double tolerance) {
    const Tensor a = shifted(random(size, size.n, dtype, device) / (size.n + 1.0), 1);
    const Tensor x = random(size, 2, dtype, device);
    const Tensor unit = eye(size.batch, size.n, dtype, device);
    for (const bool upper : {false, true}) {
      for (const bool unitriangular : {false, true}) {
        const Tensor part = upper ? triu(a, unitriangular ? 1 : 0) : tril(a, unitriangular ? -1 : 0);
        const Tensor read = unitriangular ? part + unit : part;
        expect_close(solve_triangular(a, matmul(read, x), {.upper = upper, .unitriangular = unitriangular}), x,
                     tolerance, tolerance);
        expect_close(
            solve_triangular(a, matmul(mt(x), read), {.upper = upper, .left = false, .unitriangular = unitriangular}),
            mt(x), tolerance, tolerance);
      }
    }
  });
}

TEST(Linalg, Qr) {
  for_each_case([](const Size& size, DType dtype, Device device, double tolerance) {
    for (const std::int64_t columns : {size.n, size.n + 3, size.n / 2}) {
      const Tensor a = random(size, columns, dtype, device);
      for (const QrMode mode : {QrMode::reduced, QrMode::complete}) {
        const auto [q, r] = qr(a, mode);
        EXPECT_EQ(q.size(-1), mode == QrMode::complete ? size.n : std::min(size.n, columns));
        expect_orthonormal(q, tolerance);
        expect_close(r, triu(r), 0, 0);
        expect_close(matmul(q, r), a, tolerance, tolerance);
      }
    }
  });
}

TEST(Linalg, Svd) {
  for_each_case([](const Size& size, DType dtype, Device device, double tolerance) {
    for (const std::int64_t columns : {size.n, size.n + 3, size.n / 2}) {
      const Tensor a = random(size, columns, dtype, device);
      const std::int64_t k = std::min(size.n, columns);
      for (const bool full : {false, true}) {
        const auto [u, s, vh] = svd(a, full);
        EXPECT_EQ(u.size(-1), full ? size.n : k);
        EXPECT_EQ(vh.size(-2), full ? columns : k);
        expect_orthonormal(u, tolerance);
        expect_orthonormal(mt(vh), tolerance);
        expect_close(matmul(slice(u, -1, 0, k) * unsqueeze(s, -2), slice(vh, -2, 0, k)), a, tolerance, tolerance);
        expect_close(svdvals(a), s, tolerance, tolerance);
      }
      const Tensor p = pinv(a);
      expect_close(matmul(matmul(a, p), a), a, tolerance, tolerance);
      expect_close(matmul(p, a), mt(matmul(p, a)), 20 * tolerance, 20 * tolerance);
    }
  });
}

TEST(Linalg, Eigh) {
  for_each_case([](const Size& size, DType dtype, Device device, double tolerance) {
    const Tensor x = random(size, size.n, dtype, device);
    const Tensor a = x + mt(x);
    for (const bool upper : {false, true}) {
      const auto [values, v] = eigh(upper ? triu(a) : tril(a), upper);
      expect_orthonormal(v, tolerance);
      expect_close(matmul(v * unsqueeze(values, -2), mt(v)), a, tolerance, 10 * tolerance);
      expect_close(eigvalsh(upper ? triu(a) : tril(a), upper), values, tolerance, 10 * tolerance);
    }
  });
}

TEST(Linalg, LeastSquares) {
  manual_seed(3);
  for (const Device device : test_devices()) {
    const Tensor tall = randn({2, 7, 3}, float64, device), b = randn({2, 7, 2}, float64, device);
    const Tensor residual = matmul(tall, lstsq(tall, b)) - b;
    expect_close(matmul(mt(tall), residual), zeros({2, 3, 2}), 0, 1e-12);
    const Tensor wide = mt(tall), c = randn({2, 3, 2}, float64, device);
    expect_close(lstsq(wide, c), matmul(pinv(wide), c), 1e-11, 1e-11);
  }
}

TEST(Linalg, PowersAndNorms) {
  manual_seed(4);
  for (const Device device : test_devices()) {
    const Tensor a = shifted(randn({2, 3, 3}, float64, device));
    expect_close(matrix_power(a, 0), eye({2}, 3, float64, device), 0, 0);
    expect_close(matrix_power(a, 5), matmul(a, matmul(matmul(a, a), matmul(a, a))), 1e-12, 1e-12);
    expect_close(matmul(matrix_power(a, -2), matmul(a, a)), eye({2}, 3, float64, device), 1e-11, 1e-11);
    const Tensor m = from_data<double>({1., -2., 3., -4., 5., -6.}, {2, 3}, device);
    const Tensor s = svdvals(m);
    expect_close(matrix_norm(m), Values{std::sqrt(91.0)}, 1e-14, 0);
    expect_close(matrix_norm(m, MatrixNorm::nuclear), sum(s), 1e-14, 0);
    const std::vector<std::pair<double, double>> norms{
        {1, 9}, {-1, 5}, {INFINITY, 15}, {-INFINITY, 6}, {2, max(s).item()}, {-2, min(s).item()}};
    for (const auto& [p, expected] : norms) {
      expect_close(matrix_norm(m, p), Values{expected}, 1e-14, 0);
      EXPECT_EQ(matrix_norm(m, p, true).shape(), (Shape{1, 1}));
    }
  }
}

TEST(Linalg, EmptyMatrices) {
  for (const Device device : test_devices()) {
    const Tensor tall = zeros({2, 3, 0}, float32, device);
    expect_close(qr(tall, QrMode::complete).q, eye({2}, 3, float32, device), 0, 0);
    const auto [u, s, vh] = svd(tall);
    expect_close(u, eye({2}, 3, float32, device), 0, 0);
    EXPECT_EQ(s.shape(), (Shape{2, 0}));
    EXPECT_EQ(vh.shape(), (Shape{2, 0, 0}));
    EXPECT_EQ(pinv(tall).shape(), (Shape{2, 0, 3}));
    EXPECT_EQ(
        solve(zeros({3, 3}, float32, device) + eye({}, 3, float32, device), zeros({3, 0}, float32, device)).shape(),
        (Shape{3, 0}));
    const Tensor none = zeros({2, 0, 0}, float64, device).requires_grad_();
    sum(det(none) + slogdet(none).logabsdet + sum(inv(none), {-1, -2})).backward();
    EXPECT_EQ(none.grad().shape(), (Shape{2, 0, 0}));
  }
}

// Functions of the results that do not depend on the signs of vectors.
struct Differentiated {
  const char* name;
  Shape shape;
  std::function<Tensors(const Tensor&)> f;
};

const std::vector<Differentiated>& differentiated() {
  // Distinct singular values and eigenvalues, since random ones may be close.
  const auto spread = [](const Tensor& x) {
    const std::int64_t k = std::max(x.size(-1), x.size(-2));
    const Tensor d = diag_embed(arange(1, static_cast<double>(k + 1), 1, float64, x.device()));
    return 0.2 * x + 3 * slice(slice(d, 0, 0, x.size(-2)), 1, 0, x.size(-1));
  };
  static const std::vector<Differentiated> all{
      {"inv", {2, 3, 3}, [](const Tensor& x) { return Tensors{inv(shifted(x))}; }},
      {"det", {2, 3, 3}, [](const Tensor& x) { return Tensors{det(x)}; }},
      {"slogdet", {2, 3, 3}, [](const Tensor& x) { return Tensors{slogdet(x).logabsdet}; }},
      {"cholesky", {2, 3, 3}, [](const Tensor& x) { return Tensors{cholesky(definite(x))}; }},
      {"cholesky, upper", {3, 3}, [](const Tensor& x) { return Tensors{cholesky(definite(x), true)}; }},
      {"cholesky_solve", {3, 3}, [](const Tensor& x) { return Tensors{cholesky_solve(x, cholesky(definite(x)))}; }},
      {"qr, tall",
       {2, 4, 2},
       [=](const Tensor& x) {
         return Tensors{qr(spread(x)).q, qr(spread(x)).r};
       }},
      {"qr, wide",
       {2, 4},
       [=](const Tensor& x) {
         return Tensors{qr(spread(x)).q, qr(spread(x)).r};
       }},
      {"qr, complete", {3, 4}, [=](const Tensor& x) { return Tensors{qr(spread(x), QrMode::complete).q}; }},
      {"svd, tall",
       {2, 4, 2},
       [=](const Tensor& x) {
         const auto [u, s, vh] = svd(spread(x), false);
         return Tensors{u * u, s, vh * vh, matmul(u, vh)};
       }},
      {"svd, wide",
       {2, 4},
       [=](const Tensor& x) {
         const auto [u, s, vh] = svd(spread(x), false);
         return Tensors{u * u, s, vh * vh, matmul(u, vh)};
       }},
      {"svd, full", {3, 3}, [=](const Tensor& x) { return Tensors{abs(svd(spread(x)).u)}; }},
      {"svdvals", {2, 3, 2}, [=](const Tensor& x) { return Tensors{svdvals(spread(x))}; }},
      {"eigh",
       {2, 3, 3},
       [=](const Tensor& x) {
         const auto [values, v] = eigh(spread(x) + mt(spread(x)));
         return Tensors{values, v * v};
       }},
      {"eigvalsh, upper", {3, 3}, [=](const Tensor& x) { return Tensors{eigvalsh(spread(x) + mt(spread(x)), true)}; }},
      {"pinv, tall", {2, 3, 2}, [=](const Tensor& x) { return Tensors{pinv(spread(x))}; }},
      {"pinv, wide", {2, 3}, [=](const Tensor& x) { return Tensors{pinv(spread(x))}; }},
      // A product of rank 1 stays of rank 1.
      {"pinv, rank 1", {3, 1}, [](const Tensor& x) { return Tensors{pinv(matmul(x, mt(x)), {.rtol = 1e-6})}; }},
      {"lstsq, tall", {4, 2}, [=](const Tensor& x) { return Tensors{lstsq(spread(x), x)}; }},
      {"lstsq, wide", {2, 4}, [=](const Tensor& x) { return Tensors{lstsq(spread(x), x)}; }},
      {"matrix_power",
       {3, 3},
       [](const Tensor& x) {
         return Tensors{matrix_power(shifted(x), -2), matrix_power(x, 3)};
       }},
      {"matrix_norm",
       {2, 3},
       [=](const Tensor& x) {
         return Tensors{matrix_norm(spread(x), 2), matrix_norm(spread(x), MatrixNorm::nuclear)};
       }},
  };
  return all;
}

TEST(Linalg, FirstAndSecondDerivatives) {
  manual_seed(5);
  for (const Device device : test_devices()) {
    for (const Differentiated& d : differentiated()) {
      SCOPED_TRACE(fmt::format("{} {}", device, d.name));
      const Tensor x = randn(d.shape, float64, device);
      EXPECT_TRUE(gradcheck(d.f, {x}));
      EXPECT_TRUE(gradgradcheck(d.f, {x}));
    }
    const Tensor a = randn({2, 3, 3}, float64, device), b = randn({2, 3, 2}, float64, device);
    for (const TriangularOptions options : {TriangularOptions{.upper = true}, TriangularOptions{.unitriangular = true},
                                            TriangularOptions{.upper = true, .left = false}}) {
      const auto f = [options](const Tensor& x, const Tensor& y) {
        return solve_triangular(shifted(x), options.left ? y : mt(y), options);
      };
      EXPECT_TRUE(gradcheck(f, {a, b}));
      EXPECT_TRUE(gradgradcheck(f, {a, b}));
    }
    EXPECT_TRUE(gradgradcheck([](const Tensor& x, const Tensor& y) { return solve(shifted(x), y); }, {a, b}));
  }
}

// The gradient of a singular matrix's determinant is the matrix of its cofactors.
TEST(Linalg, GradientOfZeroDeterminant) {
  for (const Device device : test_devices()) {
    for (const auto& [values, cofactors] :
         {std::pair<std::vector<double>, std::vector<double>>{{1, 2, 2, 4}, {4, -2, -2, 1}},
          {{0, 0, 0, 0}, {0, 0, 0, 0}},
          {{0, 1, 0, 3}, {3, 0, -1, 0}}}) {
      const Tensor a = from_data(values, {2, 2}, device).requires_grad_();
      det(a).backward();
      expect_close(a.grad(), cofactors, 1e-12, 1e-12);
    }
  }
}

TEST(Linalg, Errors) {
  for (const Device device : test_devices()) {
    const Tensor unit = eye({}, 2, float64, device);
    const Tensor batch = eye({2, 3}, 2, float64, device);
    const Tensor bad = contiguous(batch);
    fill_(select(select(select(select(bad, 0, 1), 0, 2), 0, 1), 0, 1), 0);
    expect_error(
        [&] {
          solve(zeros({2, 2}, float64, device), unit);
        },
        "solve: the matrix is singular: u[0, 0] of its LU factors is 0");
    expect_error([&] { inv(bad); }, "inv: matrix [1, 2] of the batch is singular: u[1, 1] of its LU factors is 0");
    expect_error([&] { cholesky(neg(unit)); },
                 "cholesky: the matrix is not positive definite: its leading minor of order 1");
    expect_error([&] { cholesky(bad); },
                 "cholesky: matrix [1, 2] of the batch is not positive definite: its leading minor of order 2");
    expect_error(
        [&] {
          cholesky(full({2, 2}, NAN, float64, device));
        },
        "cholesky: the matrix is not positive definite");
    expect_error([&] { svd(full({2, 2}, NAN, float64, device)); }, "svd: expected finite numbers, found NaN");
    expect_error([&] { eigh(full({2, 2}, INFINITY, float64, device)); }, "eigh: expected finite numbers, found Inf");
    const Tensor with_nan = full({2, 2}, NAN, float64, device);
    expect_close(solve(with_nan, unit), Values{NAN, NAN, NAN, NAN}, 0, 0);
  }
}

TEST(Linalg, ArgumentErrors) {
  const Tensor square = ones({3, 3}), wide = ones({2, 3}), vector = ones({3});
  using Unary = std::function<void(const Tensor&)>;
  const std::vector<std::pair<std::string, Unary>> of_squares{
      {"solve", [&](const Tensor& a) { solve(a, vector); }},
      {"inv", [](const Tensor& a) { inv(a); }},
      {"det", [](const Tensor& a) { det(a); }},
      {"slogdet", [](const Tensor& a) { slogdet(a); }},
      {"cholesky", [](const Tensor& a) { cholesky(a); }},
      {"cholesky_solve", [&](const Tensor& a) { cholesky_solve(square, a); }},
      {"solve_triangular", [&](const Tensor& a) { solve_triangular(a, square, {}); }},
      {"eigh", [](const Tensor& a) { eigh(a); }},
      {"eigvalsh", [](const Tensor& a) { eigvalsh(a); }},
      {"matrix_power", [](const Tensor& a) { matrix_power(a, 2); }},
  };
  const std::vector<std::pair<std::string, Unary>> of_all{
      {"qr", [](const Tensor& a) { qr(a); }},
      {"svd", [](const Tensor& a) { svd(a); }},
      {"svdvals", [](const Tensor& a) { svdvals(a); }},
      {"pinv", [](const Tensor& a) { pinv(a); }},
      {"lstsq", [&](const Tensor& a) { lstsq(a, square); }},
      {"matrix_norm", [](const Tensor& a) { matrix_norm(a, 2); }},
  };
  for (const auto& [name, f] : of_squares) {
    expect_error([&, g = f] { g(wide); }, name + ": expected square matrices, got shape [2, 3]");
    expect_error([&, g = f] { g(square.to(bfloat16)); }, name + ": expected float64 or float32, got bfloat16");
  }
  for (const auto& [name, f] : of_all) {
    expect_error([&, g = f] { g(vector); }, name + ": expected a matrix or a batch of matrices, got shape [3]");
    expect_error([&, g = f] { g(square.to(float16)); }, name + ": expected float64 or float32, got float16");
  }
  expect_error([&] { solve(square, ones({2, 1})); }, "solve: expected b of shape (…, 3) or (…, 3, k), got [2, 1]");
  expect_error([&] { solve(square, ones({3}, float64)); }, "solve: expected operands of one dtype and device");
  expect_error([&] { solve(ones({2, 3, 3}), ones({4, 3, 1})); }, "solve");
  expect_error(
      [&] {
        solve_triangular(square, ones({3, 1}), {.left = false});
      },
      "solve_triangular: expected b of shape (…, k, 3), got [3, 1]");
  expect_error([&] { cholesky_solve(ones({2, 1}), square); }, "cholesky_solve: expected b of shape (…, 3, k)");
  expect_error([&] { lstsq(wide, ones({3, 1})); }, "lstsq: expected b of shape (…, 2, k), got [3, 1]");
  expect_error([&] { pinv(wide, {.atol = -1}); }, "pinv: expected tolerances of at least 0, got -1 and 0");
  expect_error([&] { matrix_norm(wide, 3.0); },
               "matrix_norm: expected p = 1, 2, inf, or one of their negatives, got 3");
  const Tensor tall = from_data<double>({1., 2., 3., 4., 5., 7.}, {3, 2}).requires_grad_();
  expect_error([&] { sum(qr(tall, QrMode::complete).q).backward(); },
               "qr: the complete q of a matrix with more rows than columns (3 x 2) has no gradient");
  expect_error([&] { sum(svd(tall).u).backward(); }, "svd: the vectors that complete the basis of a 3 x 2 matrix");
  sum(svd(tall).s).backward();
  sum(svd(tall).vh).backward();
}

// Under autocast, float32 and 16 bits are computed in float32.
TEST(Linalg, Autocast) {
  manual_seed(6);
  for (const Device device : test_devices()) {
    const Tensor a = definite(randn({3, 3}, float32, device)), b = randn({3, 2}, float32, device);
    const Tensor expected = lstsq(a, b);
    const autograd::Autocast guard(bfloat16);
    expect_same_bits(lstsq(a, b), expected);
    EXPECT_EQ(solve(a.to(bfloat16), b).dtype(), float32);
    EXPECT_EQ(cholesky_solve(b, a.to(bfloat16)).dtype(), float32);
    EXPECT_EQ(svdvals(a.to(bfloat16)).dtype(), float32);
  }
}

TEST(Linalg, SameBitsEachTime) {
  manual_seed(7);
  for (const Device device : test_devices()) {
    const Tensor a = shifted(randn({3, 40, 40}, float32, device));
    const auto results = [&] {
      const auto [u, s, vh] = svd(a);
      const auto [values, vectors] = eigh(a);
      return Tensors{solve(a, a), cholesky(definite(a)), qr(a).q, u, s, vh, values, vectors, det(a)};
    };
    const Tensors first = results(), second = results();
    for (std::size_t i = 0; i < first.size(); ++i) {
      expect_same_bits(contiguous(first[i]), contiguous(second[i]));
    }
  }
}

}  // namespace linalg_test

#include <array>
#include <cmath>
#include <string>
#include <utility>

#include <mica/autograd/function.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/ops/diagonal/diagonal.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/elementwise/where.h>
#include <mica/ops/linalg/detail/linalg_kernels.h>
#include <mica/ops/linalg/detail/matrices.h>
#include <mica/ops/linalg/linalg.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/tril/tril.h>
#include <mica/ops/view/view.h>

namespace mica {

namespace {

using linalg::batch_of;
using linalg::broadcast_batches;
using linalg::check_info;
using linalg::columns_of;
using linalg::expect_like;
using linalg::expect_matrices;
using linalg::expect_not_capturing;
using linalg::identity;
using linalg::in_full_precision;
using linalg::matrices_of;
using linalg::transpose_of;

struct LuFactors {
  Tensor lu;
  Tensor pivots;
  Tensor info;
};

LuFactors lu_of(const Tensor& a) {
  const std::int64_t batch = numel_of(batch_of(a));
  const Tensor info = zeros({batch}, int32, a.device());
  LuFactors factors{columns_of(a), empty({batch, a.size(-1)}, int32, a.device()), info};
  if (a.numel() > 0) {
    const kernels::LuFactor args{.a = factors.lu, .pivots = factors.pivots, .info = info};
    on_device(a.device(), [&](auto device) { kernels::lu_factor(device, args); });
    if (a.device().is_cuda()) {
      // The libraries call a matrix with NaN singular.
      const Tensor has_nan = reshape(isnan(sum(a, {-2, -1})), {batch});
      factors.lu = masked_fill(factors.lu, reshape(has_nan, {batch, 1, 1}), NAN);
      factors.info = info * logical_not(has_nan).to(int32);
    }
  }
  return factors;
}

// x = a⁻¹ · b, or a⁻ᵀ · b if `transposes`, for a and b with the same leading axes. The factors are computed here, or
// given: then their gradient is a's, since a is what they were computed from.
//
// With db = a⁻ᵀ · dx, da = −db · xᵀ: Giles, "Collected matrix derivative results for forward and reverse mode
// algorithmic differentiation" (2008), 2.2.3.
struct Solve {
  static constexpr bool composed = true;
  const char* op;
  bool transposes = false;

  Tensor forward(autograd::Context& ctx, const Tensor& a, const Tensor& b, const Tensor& given_lu,
                 const Tensor& given_pivots) const {
    LuFactors factors{given_lu, given_pivots, {}};
    if (!given_lu.defined()) {
      expect_not_capturing(a, op);
      factors = lu_of(a);
      check_info(factors.info, batch_of(a), op,
                 [](int number) { return fmt::format("is singular: u[{0}, {0}] of its LU factors is 0", number - 1); });
    }
    const Tensor columns = columns_of(b);
    if (columns.numel() > 0) {
      const kernels::LuSolve args{.lu = factors.lu, .pivots = factors.pivots, .x = columns, .transposed = transposes};
      on_device(a.device(), [&](auto device) { kernels::lu_solve(device, args); });
    }
    const Tensor x = matrices_of(columns, batch_of(b));
    ctx.save_for_backward(a, x, factors.lu, factors.pivots);
    return x;
  }

  std::array<Tensor, 4> backward(autograd::Context& ctx, const Tensor& dx) const {
    const auto [a, x, lu, pivots] = ctx.saved<4>();
    const Tensor db = autograd::apply(Solve{op, !transposes}, a, dx, lu, pivots);
    Tensor da;
    if (ctx.needs_grad(0)) {
      da = neg(transposes ? matmul(x, transpose_of(db)) : matmul(db, transpose_of(x)));
    }
    return {da, db, {}, {}};
  }
};

Tensor solve_matrices(const Tensor& a, const Tensor& b, const char* op) {
  return autograd::apply(Solve{op}, a, b, Tensor{}, Tensor{});
}

// (−1)^n of int64 numbers, in a's dtype.
Tensor parity(const Tensor& n, const Tensor& a) { return 1 - 2 * fmod(n, 2).to(a.dtype()); }

Tensor number_of_swaps(const Tensor& pivots, const Shape& batch) {
  const std::int64_t n = pivots.size(1);
  const Tensor in_place = arange(1, static_cast<double>(n + 1), 1, int32, pivots.device());
  return reshape(sum(ne(pivots, in_place), {1}), batch);
}

// u's diagonal: (…, n).
Tensor diagonal_of(const LuFactors& factors, const Shape& batch) {
  Shape shape = batch;
  shape.push_back(factors.lu.size(1));
  return reshape(diagonal(factors.lu, 0, -2, -1), shape);
}

Tensor columns_of_diagonal(const Tensor& values, std::int64_t n) {
  Shape shape = values.shape();
  shape.push_back(n);
  return diag_embed(expand(unsqueeze(values, -1), shape));
}

// da = dy · det(a) · a⁻ᵀ: Giles (2008), 2.2.4. Where u has zeros on its diagonal, this is computed for a matrix close
// to a, with ε there, which has nearly a's cofactors.
struct Det {
  static constexpr bool composed = true;

  Tensor forward(autograd::Context& ctx, const Tensor& a) const {
    const Shape batch = batch_of(a);
    const LuFactors factors = lu_of(a);
    const Tensor sign = parity(number_of_swaps(factors.pivots, batch), a);
    const Tensor u = diagonal_of(factors, batch);
    const Tensor y = sign * prod(u, {-1});
    if (ctx.needs_any_grad()) {
      const Tensor size = amax(abs(u), {-1}, true);
      const double eps = a.dtype() == float64 ? 0x1p-52 : 0x1p-23;
      const Tensor shift = where(eq(u, 0), where(eq(size, 0), eps, eps * size), 0 * size);
      const Tensor lu = factors.lu + reshape(diag_embed(shift), factors.lu.shape());
      ctx.save_for_backward(a, y, sign * prod(u + shift, {-1}), lu, factors.pivots);
    }
    return y;
  }

  Tensor backward(autograd::Context& ctx, const Tensor& dy) const {
    const auto [a, y, near, lu, pivots] = ctx.saved<5>();
    const Tensor scale = dy * where(eq(y, 0), near, y);
    return autograd::apply(Solve{"det", true}, a, columns_of_diagonal(scale, a.size(-1)), lu, pivots);
  }
};

// d log |det a| = tr(a⁻¹ · da).
struct Slogdet {
  static constexpr bool composed = true;

  std::array<Tensor, 2> forward(autograd::Context& ctx, const Tensor& a) const {
    const Shape batch = batch_of(a);
    const LuFactors factors = lu_of(a);
    const Tensor u = diagonal_of(factors, batch);
    const Tensor log = sum(mica::log(abs(u)), {-1});
    const Tensor sign = parity(number_of_swaps(factors.pivots, batch) + sum(lt(u, 0), {-1}), a);
    // A pivot of 0 or NaN is one of the result too.
    const Tensor result = sign * where(eq(prod(ne(u, 0), {-1}), 0), 0, where(isnan(log), log, ones_like(log)));
    ctx.save_for_backward(a, factors.lu, factors.pivots);
    return {result, log};
  }

  Tensor backward(autograd::Context& ctx, const Tensor&, const Tensor& dlog) const {
    const auto [a, lu, pivots] = ctx.saved<3>();
    return autograd::apply(Solve{"slogdet", true}, a, columns_of_diagonal(dlog, a.size(-1)), lu, pivots);
  }
};

// The lower triangle l with l · lᵀ = a. With p = lᵀ · dl, its upper triangle replaced by the transposed lower one,
// da = ½ · l⁻ᵀ · p · l⁻¹: Murray, "Differentiation of the Cholesky decomposition" (2016), symmetric.
struct Cholesky {
  static constexpr bool composed = true;

  Tensor forward(autograd::Context& ctx, const Tensor& a) const {
    expect_not_capturing(a, "cholesky");
    const Tensor columns = columns_of(a);
    const Tensor info = zeros({columns.size(0)}, int32, a.device());
    if (a.numel() > 0) {
      const kernels::Cholesky args{.a = columns, .info = info};
      on_device(a.device(), [&](auto device) { kernels::cholesky(device, args); });
    }
    check_info(info, batch_of(a), "cholesky", [](int number) {
      return fmt::format("is not positive definite: its leading minor of order {} is not positive", number);
    });
    const Tensor l = tril(matrices_of(columns, batch_of(a)));
    ctx.save_for_backward(l);
    return l;
  }

  Tensor backward(autograd::Context& ctx, const Tensor& dl) const {
    const auto [l] = ctx.saved<1>();
    const Tensor p = tril(matmul(transpose_of(l), dl));
    const Tensor both = p + transpose_of(tril(p, -1));
    const TriangularOptions upper{.upper = true};
    const Tensor half = solve_triangular(transpose_of(l), both, upper);
    return 0.5 * solve_triangular(transpose_of(l), transpose_of(half), upper);
  }
};

// x = a⁻¹ · b. As for Solve, for the elements of a that are read.
struct TriangularSolve {
  static constexpr bool composed = true;
  bool upper;
  bool unit;

  Tensor forward(autograd::Context& ctx, const Tensor& a, const Tensor& b) const {
    const Tensor columns = columns_of(b);
    if (columns.numel() > 0) {
      const Tensor factor = view(contiguous_data(transpose_of(a)), {columns.size(0), a.size(-1), a.size(-1)});
      const kernels::TriangularSolve args{.a = factor, .x = columns, .upper = upper, .unit = unit};
      on_device(a.device(), [&](auto device) { kernels::solve_triangular(device, args); });
    }
    const Tensor x = matrices_of(columns, batch_of(b));
    ctx.save_for_backward(a, ctx.needs_grad(0) ? x : Tensor{});
    return x;
  }

  std::array<Tensor, 2> backward(autograd::Context& ctx, const Tensor& dx) const {
    const auto [a, x] = ctx.saved<2>();
    const Tensor db = autograd::apply(TriangularSolve{!upper, unit}, transpose_of(a), dx);
    Tensor da;
    if (ctx.needs_grad(0)) {
      const Tensor all = neg(matmul(db, transpose_of(x)));
      da = upper ? triu(all, unit ? 1 : 0) : tril(all, unit ? -1 : 0);
    }
    return {da, db};
  }
};

}  // namespace

Tensor solve(const Tensor& a_in, const Tensor& b_in) {
  return in_full_precision(
      [](Tensor a, Tensor b) {
        expect_matrices(a, "solve", true);
        expect_like(b, a, "solve");
        const std::int64_t n = a.size(-1);
        const bool is_vector = b.dim() == 1 || b.shape() == a.shape().slice(0, a.dim() - 1);
        check(b.dim() > 0 && b.size(is_vector ? -1 : -2) == n,
              "solve: expected b of shape (…, {0}) or (…, {0}, k), got {1}", n, b.shape());
        if (is_vector) {
          b = unsqueeze(b, -1);
        }
        if (a.dim() == 2 && b.dim() > 2) {
          // One matrix: all vectors are columns, so that it is factored once.
          const int leading = b.dim() - 2;
          Dims axes{leading}, back;
          for (int axis = 0; axis < leading; ++axis) {
            axes.push_back(axis);
            back.push_back(axis + 1);
          }
          axes.push_back(leading + 1);
          back.push_back(0);
          back.push_back(leading + 1);
          const Tensor rows = permute(b, axes);
          const std::int64_t columns = numel_of(rows.shape().slice(1));
          return permute(reshape(solve_matrices(a, reshape(rows, {n, columns}), "solve"), rows.shape()), back);
        }
        broadcast_batches(a, b, "solve");
        const Tensor x = solve_matrices(a, b, "solve");
        return is_vector ? squeeze(x, -1) : x;
      },
      a_in, b_in);
}

Tensor inv(const Tensor& a_in) {
  return in_full_precision(
      [](const Tensor& a) {
        expect_matrices(a, "inv", true);
        return solve_matrices(a, identity(batch_of(a), a.size(-1), a), "inv");
      },
      a_in);
}

Tensor det(const Tensor& a_in) {
  return in_full_precision(
      [](const Tensor& a) {
        expect_matrices(a, "det", true);
        return a.numel() == 0 ? prod(diagonal(a, 0, -2, -1), {-1}) : autograd::apply(Det{}, a);
      },
      a_in);
}

SlogdetResult slogdet(const Tensor& a_in) {
  return in_full_precision(
      [](const Tensor& a) {
        expect_matrices(a, "slogdet", true);
        auto [sign, logabsdet] = autograd::apply(Slogdet{}, a);
        return SlogdetResult{sign, logabsdet};
      },
      a_in);
}

Tensor cholesky(const Tensor& a_in, bool upper) {
  return in_full_precision(
      [&](const Tensor& a) {
        expect_matrices(a, "cholesky", true);
        return upper ? transpose_of(autograd::apply(Cholesky{}, transpose_of(a))) : autograd::apply(Cholesky{}, a);
      },
      a_in);
}

Tensor solve_triangular(const Tensor& a_in, const Tensor& b_in, TriangularOptions options) {
  return in_full_precision(
      [&](Tensor a, Tensor b) {
        expect_matrices(a, "solve_triangular", true);
        expect_like(b, a, "solve_triangular");
        check(b.dim() >= 2 && b.size(options.left ? -2 : -1) == a.size(-1),
              "solve_triangular: expected b of shape {}, got {}",
              options.left ? fmt::format("(…, {}, k)", a.size(-1)) : fmt::format("(…, k, {})", a.size(-1)), b.shape());
        broadcast_batches(a, b, "solve_triangular");
        if (options.left) {
          return autograd::apply(TriangularSolve{options.upper, options.unitriangular}, a, b);
        }
        // x · a = b is aᵀ · xᵀ = bᵀ.
        return transpose_of(
            autograd::apply(TriangularSolve{!options.upper, options.unitriangular}, transpose_of(a), transpose_of(b)));
      },
      a_in, b_in);
}

Tensor cholesky_solve(const Tensor& b_in, const Tensor& factor_in, bool upper) {
  return in_full_precision(
      [&](const Tensor& b, const Tensor& factor) {
        expect_matrices(factor, "cholesky_solve", true);
        check(b.dim() >= 2 && b.size(-2) == factor.size(-1), "cholesky_solve: expected b of shape (…, {}, k), got {}",
              factor.size(-1), b.shape());
        const Tensor l = upper ? transpose_of(factor) : factor;
        return solve_triangular(transpose_of(l), solve_triangular(l, b, {}), {.upper = true});
      },
      b_in, factor_in);
}

}  // namespace mica

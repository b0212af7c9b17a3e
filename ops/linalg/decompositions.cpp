#include <algorithm>
#include <array>
#include <cmath>
#include <string>
#include <utility>

#include <mica/autograd/function.h>
#include <mica/autograd/grad_mode.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/detail/finite.h>
#include <mica/ops/diagonal/diagonal.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/elementwise/where.h>
#include <mica/ops/join/join.h>
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
using linalg::empty_columns;
using linalg::expect_like;
using linalg::expect_matrices;
using linalg::expect_not_capturing;
using linalg::identity;
using linalg::in_full_precision;
using linalg::matrices_of;
using linalg::transpose_of;

void expect_finite(const Tensor& a, const char* op) {
  expect_not_capturing(a, op);
  const char* const fault = first_fault(a);
  check(fault == nullptr, "{}: expected finite numbers, found {}", op, fault == nullptr ? "" : fault);
}

std::string not_converged(int) { return "did not converge"; }

// x − xᵀ.
Tensor skew(const Tensor& x) { return x - transpose_of(x); }

// xⱼ − xᵢ, with 1 on the diagonal: (…, n) → (…, n, n).
Tensor differences(const Tensor& x) { return unsqueeze(x, -2) - unsqueeze(x, -1) + identity({}, x.size(-1), x); }

// q and r. The gradient for m ≥ n: Walter and Lehmann, "Algorithmic differentiation of linear algebra functions with
// application in optimum experimental design" (2010). For m < n, where a = [x | y] and r = [u | v] with x = q · u and
// y = q · v: Roberts and Roberts, "QR and LQ decomposition matrix backpropagation algorithms" (2020).
struct Qr {
  static constexpr bool composed = true;
  bool complete;

  std::array<Tensor, 2> forward(autograd::Context& ctx, const Tensor& a) const {
    const std::int64_t m = a.size(-2);
    const std::int64_t n = a.size(-1);
    const std::int64_t width = complete ? m : std::min(m, n);
    const Tensor columns = columns_of(a);
    Tensor q;
    if (a.numel() > 0) {
      const Tensor q_columns = empty_columns(columns.size(0), width, m, a);
      const kernels::Qr args{.a = columns, .q = q_columns};
      on_device(a.device(), [&](auto device) { kernels::qr(device, args); });
      q = matrices_of(q_columns, batch_of(a));
    } else {
      q = clone(slice(identity(batch_of(a), m, a), -1, 0, width));
    }
    const Tensor r = triu(slice(matrices_of(columns, batch_of(a)), -2, 0, width));
    ctx.save_for_backward(q, r);
    return {q, r};
  }

  Tensor backward(autograd::Context& ctx, const Tensor& dq, const Tensor& dr) const {
    const auto [q, r] = ctx.saved<2>();
    const std::int64_t m = q.size(-2);
    const std::int64_t n = r.size(-1);
    check(!complete || m <= n,
          "qr: the complete q of a matrix with more rows than columns ({} x {}) has no gradient; use QrMode::reduced",
          m, n);
    if (m >= n) {
      return gradient_of_tall(q, r, dq, dr);
    }
    const Tensor u = slice(r, -1, 0, m), v = slice(r, -1, m, n);
    const Tensor du = slice(dr, -1, 0, m), dv = slice(dr, -1, m, n);
    const Tensor dq_and_y = dq + matmul(matmul(q, v), transpose_of(dv));
    return cat({gradient_of_tall(q, u, dq_and_y, du), matmul(q, dv)}, -1);
  }

  // (dq + q · s) · r⁻ᵀ, where s is the symmetric matrix whose lower triangle is that of r · drᵀ − dqᵀ · q.
  static Tensor gradient_of_tall(const Tensor& q, const Tensor& r, const Tensor& dq, const Tensor& dr) {
    const Tensor lower = tril(matmul(r, transpose_of(dr)) - matmul(transpose_of(dq), q));
    const Tensor s = lower + transpose_of(tril(lower, -1));
    return transpose_of(solve_triangular(r, transpose_of(dq + matmul(q, s)), {.upper = true}));
  }
};

struct SvdColumns {
  Tensor u, s, v;  // undefined vectors if they are not asked for
};

SvdColumns svd_columns(const Tensor& a, bool full, bool vectors) {
  expect_finite(a, "svd");
  const std::int64_t m = a.size(-2);
  const std::int64_t n = a.size(-1);
  const std::int64_t k = std::min(m, n);
  const Tensor columns = columns_of(a);
  const std::int64_t batch = columns.size(0);
  const Tensor info = zeros({batch}, int32, a.device());
  SvdColumns result{.u = {}, .s = empty({batch, k}, a.dtype(), a.device()), .v = {}};
  if (vectors) {
    result.u = empty_columns(batch, full ? m : k, m, a);
    result.v = empty_columns(batch, full ? n : k, n, a);
  }
  if (a.numel() > 0) {
    const kernels::Svd args{
        .a = columns, .u = result.u, .s = result.s, .v = result.v, .info = info, .vectors = vectors};
    on_device(a.device(), [&](auto device) { kernels::svd(device, args); });
    check_info(info, batch_of(a), "svd", not_converged);
  } else if (vectors) {
    copy_into(result.u, expand(slice(identity({}, m, a), 0, 0, full ? m : k), result.u.shape()));
    copy_into(result.v, expand(slice(identity({}, n, a), 0, 0, full ? n : k), result.v.shape()));
  }
  return result;
}

Tensor values_of(const Tensor& s, const Tensor& a) {
  Shape shape = batch_of(a);
  shape.push_back(s.size(-1));
  return reshape(s, shape);
}

// The gradient: Townsend, "Differentiating the singular value decomposition" (2016). With e = differences of s²,
//   da = u · (skew(uᵀdu) / e · s + s · skew(vᵀdv) / e + ds) · vᵀ + (1 − uuᵀ) du s⁻¹ vᵀ + u s⁻¹ dvᵀ (1 − vvᵀ)
struct Svd {
  static constexpr bool composed = true;
  bool full;

  std::array<Tensor, 3> forward(autograd::Context& ctx, const Tensor& a) const {
    ctx.set_materialize_grads(false);
    const SvdColumns parts = svd_columns(a, full, true);
    const Tensor u = matrices_of(parts.u, batch_of(a));
    const Tensor s = values_of(parts.s, a);
    const Tensor vh = transpose_of(matrices_of(parts.v, batch_of(a)));
    ctx.save_for_backward(u, s, vh);
    return {u, s, vh};
  }

  Tensor backward(autograd::Context& ctx, const Tensor& du, const Tensor& ds, const Tensor& dvh) const {
    const auto [all_u, s, all_vh] = ctx.saved<3>();
    const std::int64_t m = all_u.size(-2);
    const std::int64_t n = all_vh.size(-1);
    const std::int64_t k = s.size(-1);
    const bool has_completion = (du.defined() && du.size(-1) > k) || (dvh.defined() && dvh.size(-2) > k);
    check(!has_completion,
          "svd: the vectors that complete the basis of a {} x {} matrix have no gradient; use full_matrices = false", m,
          n);
    const Tensor u = slice(all_u, -1, 0, k);
    const Tensor vh = slice(all_vh, -2, 0, k);
    const Tensor row = unsqueeze(s, -2);
    const Tensor column = unsqueeze(s, -1);
    if (!du.defined() && !dvh.defined()) {
      return ds.defined() ? matmul(u * unsqueeze(ds, -2), vh) : Tensor{};
    }
    const Tensor e = (row - column) * (row + column) + identity({}, k, s);
    Tensor inside = ds.defined() ? diag_embed(ds) : zeros_like(e);
    Tensor da;
    if (du.defined()) {
      const Tensor u_du = matmul(transpose_of(u), du);
      inside = inside + skew(u_du) / e * row;
      if (m > k) {
        da = matmul((du - matmul(u, u_du)) / row, vh);
      }
    }
    if (dvh.defined()) {
      const Tensor v_dv = matmul(vh, transpose_of(dvh));
      inside = inside + column * (skew(v_dv) / e);
      if (n > k) {
        const Tensor outside = matmul(u, (dvh - matmul(transpose_of(v_dv), vh)) / column);
        da = da.defined() ? da + outside : outside;
      }
    }
    const Tensor within = matmul(u, matmul(inside, vh));
    return da.defined() ? da + within : within;
  }
};

struct EighColumns {
  Tensor values, vectors;
};

EighColumns eigh_columns(const Tensor& a, bool vectors) {
  expect_finite(a, "eigh");
  const Tensor columns = columns_of(a);
  const Tensor info = zeros({columns.size(0)}, int32, a.device());
  EighColumns result{empty({columns.size(0), a.size(-1)}, a.dtype(), a.device()), columns};
  if (a.numel() > 0) {
    const kernels::Eigh args{.a = columns, .values = result.values, .info = info, .vectors = vectors};
    on_device(a.device(), [&](auto device) { kernels::eigh(device, args); });
    check_info(info, batch_of(a), "eigh", not_converged);
  }
  return result;
}

// From the lower triangle. da = v · (½ skew(vᵀdv) / e + dλ) · vᵀ, where e are the differences of eigenvalues: Giles
// (2008), 3.1, made symmetric.
struct Eigh {
  static constexpr bool composed = true;

  std::array<Tensor, 2> forward(autograd::Context& ctx, const Tensor& a) const {
    ctx.set_materialize_grads(false);
    const EighColumns parts = eigh_columns(a, true);
    const Tensor values = values_of(parts.values, a);
    const Tensor vectors = matrices_of(parts.vectors, batch_of(a));
    ctx.save_for_backward(values, vectors);
    return {values, vectors};
  }

  Tensor backward(autograd::Context& ctx, const Tensor& dvalues, const Tensor& dvectors) const {
    const auto [values, v] = ctx.saved<2>();
    if (!dvectors.defined()) {
      return dvalues.defined() ? matmul(v * unsqueeze(dvalues, -2), transpose_of(v)) : Tensor{};
    }
    Tensor inside = 0.5 * skew(matmul(transpose_of(v), dvectors)) / differences(values);
    inside = dvalues.defined() ? inside + diag_embed(dvalues) : inside;
    return matmul(v, matmul(inside, transpose_of(v)));
  }
};

// p = a⁺. With the derivative of Golub and Pereyra, "The differentiation of pseudo-inverses and nonlinear least squares
// problems whose variables separate" (1973), dp = −p·da·p + p·pᵀ·daᵀ·(1 − a·p) + (1 − p·a)·daᵀ·pᵀ·p.
struct Pinv {
  static constexpr bool composed = true;
  double atol;
  double rtol;

  Tensor forward(autograd::Context& ctx, const Tensor& a) const {
    const std::int64_t k = std::min(a.size(-2), a.size(-1));
    const SvdColumns parts = svd_columns(a, false, true);
    Tensor p = zeros({parts.u.size(0), a.size(-1), a.size(-2)}, a.dtype(), a.device());
    if (k > 0) {
      const Tensor smallest = maximum(rtol * amax(parts.s, {-1}, true), atol);
      const Tensor inverse = where(gt(parts.s, smallest), 1 / parts.s, 0);
      p = matmul(transpose_of(parts.v) * unsqueeze(inverse, -2), parts.u);
    }
    Shape shape = batch_of(a);
    shape.push_back(a.size(-1));
    shape.push_back(a.size(-2));
    p = reshape(p, shape);
    ctx.save_for_backward(a, p);
    return p;
  }

  Tensor backward(autograd::Context& ctx, const Tensor& dp) const {
    const auto [a, p] = ctx.saved<2>();
    const Tensor pt = transpose_of(p);
    const Tensor g = transpose_of(dp);
    const Tensor gp = matmul(g, p);
    const Tensor left = matmul(gp, pt);             // dpᵀ · p · pᵀ
    const Tensor right = matmul(pt, matmul(p, g));  // pᵀ · p · dpᵀ
    return left - matmul(a, matmul(p, left)) + right - matmul(matmul(right, p), a) - matmul(transpose_of(gp), pt);
  }
};

bool records(const Tensor& a) { return autograd::grad_enabled() && a.requires_grad(); }

}  // namespace

QrResult qr(const Tensor& a_in, QrMode mode) {
  return in_full_precision(
      [&](const Tensor& a) {
        expect_matrices(a, "qr", false);
        auto [q, r] = autograd::apply(Qr{mode == QrMode::complete}, a);
        return QrResult{q, r};
      },
      a_in);
}

SvdResult svd(const Tensor& a_in, bool full_matrices) {
  return in_full_precision(
      [&](const Tensor& a) {
        expect_matrices(a, "svd", false);
        auto [u, s, vh] = autograd::apply(Svd{full_matrices}, a);
        return SvdResult{u, s, vh};
      },
      a_in);
}

Tensor svdvals(const Tensor& a_in) {
  return in_full_precision(
      [](const Tensor& a) {
        expect_matrices(a, "svdvals", false);
        return records(a) ? svd(a, false).s : values_of(svd_columns(a, false, false).s, a);
      },
      a_in);
}

EighResult eigh(const Tensor& a_in, bool upper) {
  return in_full_precision(
      [&](const Tensor& a) {
        expect_matrices(a, "eigh", true);
        auto [values, vectors] = autograd::apply(Eigh{}, upper ? transpose_of(a) : a);
        return EighResult{values, vectors};
      },
      a_in);
}

Tensor eigvalsh(const Tensor& a_in, bool upper) {
  return in_full_precision(
      [&](const Tensor& a) {
        expect_matrices(a, "eigvalsh", true);
        return records(a) ? eigh(a, upper).eigenvalues
                          : values_of(eigh_columns(upper ? transpose_of(a) : a, false).values, a);
      },
      a_in);
}

Tensor pinv(const Tensor& a_in, PinvOptions options) {
  return in_full_precision(
      [&](const Tensor& a) {
        expect_matrices(a, "pinv", false);
        check(options.atol >= 0 && options.rtol.value_or(0) >= 0,
              "pinv: expected tolerances of at least 0, got {} and {}", options.atol, options.rtol.value_or(0));
        const double eps = a.dtype() == float64 ? 0x1p-52 : 0x1p-23;
        const double relative = options.atol > 0 ? 0 : static_cast<double>(std::max(a.size(-2), a.size(-1))) * eps;
        return autograd::apply(Pinv{options.atol, options.rtol.value_or(relative)}, a);
      },
      a_in);
}

Tensor lstsq(const Tensor& a_in, const Tensor& b_in) {
  return in_full_precision(
      [](Tensor a, Tensor b) {
        expect_matrices(a, "lstsq", false);
        expect_like(b, a, "lstsq");
        check(b.dim() >= 2 && b.size(-2) == a.size(-2), "lstsq: expected b of shape (…, {}, k), got {}", a.size(-2),
              b.shape());
        broadcast_batches(a, b, "lstsq");
        if (a.size(-2) >= a.size(-1)) {
          const auto [q, r] = qr(a);
          return solve_triangular(r, matmul(transpose_of(q), b), {.upper = true});
        }
        const auto [q, r] = qr(transpose_of(a));
        return matmul(q, solve_triangular(transpose_of(r), b, {}));
      },
      a_in, b_in);
}

Tensor matrix_power(const Tensor& a_in, std::int64_t k) {
  return in_full_precision(
      [&](const Tensor& a) {
        expect_matrices(a, "matrix_power", true);
        if (k == 0) {
          return clone(identity(batch_of(a), a.size(-1), a));
        }
        Tensor square = k < 0 ? inv(a) : a;
        Tensor result;
        for (std::uint64_t rest = k < 0 ? -static_cast<std::uint64_t>(k) : static_cast<std::uint64_t>(k); rest > 0;) {
          if ((rest & 1) != 0) {
            result = result.defined() ? matmul(result, square) : square;
          }
          rest >>= 1;
          square = rest > 0 ? matmul(square, square) : square;
        }
        return result;
      },
      a_in);
}

Tensor matrix_norm(const Tensor& a_in, MatrixNorm norm, bool keepdim) {
  return in_full_precision(
      [&](const Tensor& a) {
        expect_matrices(a, "matrix_norm", false);
        if (norm == MatrixNorm::frobenius) {
          return vector_norm(a, {-2, -1}, 2, keepdim);
        }
        const Tensor y = sum(svdvals(a), {-1});
        return keepdim ? unsqueeze(unsqueeze(y, -1), -1) : y;
      },
      a_in);
}

Tensor matrix_norm(const Tensor& a_in, double p, bool keepdim) {
  return in_full_precision(
      [&](const Tensor& a) {
        expect_matrices(a, "matrix_norm", false);
        const double size = std::abs(p);
        check(size == 1 || size == 2 || std::isinf(p),
              "matrix_norm: expected p = 1, 2, inf, or one of their negatives, got {}", p);
        const Tensor values = size == 2 ? svdvals(a) : sum(abs(a), {size == 1 ? -2 : -1});
        const Tensor y = p > 0 ? amax(values, {-1}) : amin(values, {-1});
        return keepdim ? unsqueeze(unsqueeze(y, -1), -1) : y;
      },
      a_in);
}

}  // namespace mica

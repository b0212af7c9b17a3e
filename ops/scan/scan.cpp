#include <limits>

#include <mica/autograd/autocast.h>
#include <mica/autograd/function.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/elementwise/where.h>
#include <mica/ops/index/index.h>
#include <mica/ops/join/join.h>
#include <mica/ops/scan/detail/scan_kernels.h>
#include <mica/ops/scan/scan.h>
#include <mica/ops/view/view.h>

namespace mica {

namespace {

// All functions here scan along the last axis.

Tensor as_rows(const Tensor& x) { return view(x, {-1, x.size(-1)}); }

// Calls scan(device, x, y) with x and a new tensor y as matrices, unless they are empty. Returns y.
template <class Scan>
Tensor scanned(const Tensor& x, DType dtype, const Scan& scan) {
  const Tensor y = empty(x.shape(), dtype, x.device());
  if (x.numel() > 0) {
    const Tensor from = as_rows(contiguous_data(x)), to = as_rows(y);
    on_device(x.device(), [&](auto device) { scan(device, from, to); });
  }
  return y;
}

// The gradient is the cumulative sum in the other direction: dx[i] = Σ dy[j] over j ≥ i.
struct Cumsum {
  static constexpr bool composed = true;
  bool reverse;

  Tensor forward(autograd::Context&, const Tensor& x) const {
    return scanned(x, x.dtype(), [&](auto device, const Tensor& from, const Tensor& to) {
      kernels::cumsum(device, kernels::Cumsum{.x = from, .y = to, .reverse = reverse});
    });
  }
  Tensor backward(autograd::Context&, const Tensor& dy) const { return autograd::apply(Cumsum{!reverse}, dy); }
};

// x moved by one position, from j − 1 to j, with `first` (of length 1) at position 0.
Tensor delayed(const Tensor& x, const Tensor& first) { return cat({first, slice(x, -1, 0, x.size(-1) - 1)}, -1); }

Tensor first_of(const Tensor& x) { return slice(x, -1, 0, 1); }

// See kernels::Recurrence. The gradient with respect to b is the recurrence in the other direction, with the same
// factors a; that with respect to a factor is the product of the values on its two sides.
struct Recurrence {
  static constexpr bool composed = true;
  bool reverse;

  Tensor forward(autograd::Context& ctx, const Tensor& a, const Tensor& b) const {
    const Tensor y = empty(b.shape(), b.dtype(), b.device());
    if (y.numel() > 0) {
      const Tensor factors = as_rows(contiguous_data(a)), terms = as_rows(contiguous_data(b)), to = as_rows(y);
      const kernels::Recurrence args{.a = factors, .b = terms, .y = to, .reverse = reverse};
      on_device(b.device(), [&](auto device) { kernels::recurrence(device, args); });
    }
    ctx.save_for_backward(a, y);
    return y;
  }
  Tensors backward(autograd::Context& ctx, const Tensor& dy) const {
    const auto [a, y] = ctx.saved<2>();
    const Tensor db = autograd::apply(Recurrence{!reverse}, a, dy);
    const Tensor none = zeros_like(first_of(y));
    return {ctx.needs_grad(0) ? (reverse ? delayed(db, none) * y : db * delayed(y, none)) : Tensor{}, db};
  }
};

// dx[i] = y[i − 1] · Σ dy[j] x[i + 1] ⋯ x[j] over j ≥ i, where the sum is a recurrence from the end.
struct Cumprod {
  static constexpr bool composed = true;

  Tensor forward(autograd::Context& ctx, const Tensor& x) const {
    const Tensor y = scanned(x, x.dtype(), [](auto device, const Tensor& from, const Tensor& to) {
      kernels::cumprod(device, kernels::Cumprod{.x = from, .y = to});
    });
    ctx.save_for_backward(x, y);
    return y;
  }
  Tensor backward(autograd::Context& ctx, const Tensor& dy) const {
    const auto [x, y] = ctx.saved<2>();
    return delayed(y, ones_like(first_of(y))) * autograd::apply(Recurrence{true}, x, dy);
  }
};

// a − b, but 0 for equal infinities.
Tensor difference(const Tensor& a, const Tensor& b) {
  const Tensor same = logical_and(eq(a, b), logical_not(isfinite(a)));
  return where(same, 0, a - where(same, 0, b));
}

// dx[i] = Σ dy[j] exp(x[i] − y[j]) over j ≥ i = exp(x[i] − y[i]) · Σ dy[j] exp(y[i] − y[j]). Since y does not decrease,
// no factor exceeds 1.
struct Logcumsumexp {
  static constexpr bool composed = true;

  Tensor forward(autograd::Context& ctx, const Tensor& x) const {
    const Tensor y = scanned(x, x.dtype(), [](auto device, const Tensor& from, const Tensor& to) {
      kernels::logcumsumexp(device, kernels::Logcumsumexp{.x = from, .y = to});
    });
    ctx.save_for_backward(x, y);
    return y;
  }
  Tensor backward(autograd::Context& ctx, const Tensor& dy) const {
    const auto [x, y] = ctx.saved<2>();
    const Tensor factors = exp(difference(delayed(y, first_of(y)), y));
    return exp(difference(x, y)) * autograd::apply(Recurrence{true}, factors, dy);
  }
};

// Applies a function of the last axis to another axis.
template <class Function>
Tensor scanned_along(Function function, const Tensor& x, int axis) {
  if (axis == x.dim() - 1) {
    return autograd::apply(std::move(function), x);
  }
  return transpose(autograd::apply(std::move(function), transpose(x, axis, -1)), axis, -1);
}

MaxResult cumextreme(const Tensor& x, std::int64_t axis, bool largest) {
  const int at = normalize_axis(axis, x.dim(), largest ? "cummax" : "cummin");
  const Tensor indices =
      scanned(transpose(x.detach(), at, -1), int64, [&](auto device, const Tensor& from, const Tensor& to) {
        kernels::cumextreme(device, kernels::Cumextreme{.x = from, .indices = to, .largest = largest});
      });
  const Tensor positions = contiguous_data(transpose(indices, at, -1));
  return {.values = gather(x, at, positions), .indices = positions};
}

}  // namespace

Tensor cumsum(const Tensor& x, std::int64_t axis) {
  const int at = normalize_axis(axis, x.dim(), "cumsum");
  return scanned_along(Cumsum{false}, is_floating(x.dtype()) ? x : x.to(int64), at);
}

Tensor cumprod(const Tensor& x, std::int64_t axis) {
  const int at = normalize_axis(axis, x.dim(), "cumprod");
  const bool floating = is_floating(x.dtype());
  return scanned_along(Cumprod{}, x.to(floating ? accumulate_dtype(x.dtype()) : int64), at)
      .to(floating ? x.dtype() : int64);
}

Tensor logcumsumexp(const Tensor& x, std::int64_t axis) {
  const int at = normalize_axis(axis, x.dim(), "logcumsumexp");
  check(is_floating(x.dtype()), "logcumsumexp: expected a floating dtype, got {}", x.dtype());
  const Tensor y = scanned_along(Logcumsumexp{}, x.to(accumulate_dtype(x.dtype())), at);
  return autograd::autocast_widens(x) ? y : y.to(x.dtype());
}

MaxResult cummax(const Tensor& x, std::int64_t axis) { return cumextreme(x, axis, true); }
MaxResult cummin(const Tensor& x, std::int64_t axis) { return cumextreme(x, axis, false); }

}  // namespace mica

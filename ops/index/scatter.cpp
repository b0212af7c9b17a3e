#include <utility>

#include <mica/autograd/function.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/elementwise/where.h>
#include <mica/ops/index/detail/gather_for.h>
#include <mica/ops/index/detail/scatter_kernels.h>
#include <mica/ops/index/index.h>
#include <mica/ops/index/scatter.h>
#include <mica/ops/join/join.h>
#include <mica/ops/view/view.h>

namespace mica {

namespace {

using kernels::Combination;

// From here on, x and src are flattened, and `rows` are the positions in x that the elements of src go to. A position
// out of range, which there is on CUDA only, is -1.

Tensor combined_at(Combination combination, const Tensor& x, const Tensor& src, const Tensor& rows) {
  const Tensor y = empty(x.shape(), x.dtype(), x.device());
  copy_into(y, x);
  if (rows.numel() > 0) {
    const Tensor from = contiguous_data(src);
    const kernels::Scatter args{.combination = combination, .src = from, .rows = rows, .y = y};
    on_device(x.device(), [&](auto device) { kernels::scatter(device, args); });
  }
  return y;
}

// How many elements go to each position of x, in `dtype`.
Tensor hits_of(const Tensor& x, const Tensor& rows, DType dtype) {
  return index_add(zeros(x.shape(), dtype, x.device()), 0, rows, ones(rows.shape(), dtype, x.device()));
}

Tensor is_hit(const Tensor& x, const Tensor& rows) { return gt(hits_of(x, rows, int32), 0); }

struct Replace {
  static constexpr bool composed = true;

  Tensor forward(autograd::Context& ctx, const Tensor& x, const Tensor& src, const Tensor& rows) const {
    ctx.save_for_backward(rows);
    return combined_at(Combination::last, x, src, rows);
  }
  Tensors backward(autograd::Context& ctx, const Tensor& dy) const {
    const auto [rows] = ctx.saved<1>();
    const Tensor order = arange(static_cast<double>(rows.numel()), int64, dy.device());
    const Tensor last = combined_at(Combination::last, full(dy.shape(), -1, int64, dy.device()), order, rows);
    Tensors gradients(3);
    if (ctx.needs_grad(0)) {
      gradients[0] = where(ge(last, 0), 0, dy);
    }
    if (ctx.needs_grad(1)) {
      gradients[1] = where(eq(index_select(last, 0, rows), order), index_select(dy, 0, rows), 0);
    }
    return gradients;
  }
};

// Equal, or both NaN.
Tensor same_number(const Tensor& a, const Tensor& b) { return logical_or(eq(a, b), logical_and(isnan(a), isnan(b))); }

struct ScatterExtreme {
  static constexpr bool composed = true;
  bool largest;
  bool include_self;

  Tensor forward(autograd::Context& ctx, const Tensor& x, const Tensor& src, const Tensor& rows) const {
    // Without x, one of the elements takes its place: it is combined with itself.
    const Tensor start = include_self ? x : combined_at(Combination::last, x, src, rows);
    const Tensor y = combined_at(largest ? Combination::largest : Combination::smallest, start, src, rows);
    ctx.save_for_backward(x, src, rows, y);
    return y;
  }
  Tensors backward(autograd::Context& ctx, const Tensor& dy) const {
    const auto [x, src, rows, y] = ctx.saved<4>();
    const Tensor equal = same_number(src.detach(), index_select(y.detach(), 0, rows));
    Tensor self_equal = same_number(x.detach(), y.detach());
    if (!include_self) {
      self_equal = logical_and(self_equal, logical_not(is_hit(x, rows)));
    }
    const DType wide = accumulate_dtype(dy.dtype());
    const Tensor count = index_add(self_equal.to(wide), 0, rows, equal.to(wide));
    const Tensor share = (dy.to(wide) / count).to(dy.dtype());
    return {ctx.needs_grad(0) ? where(self_equal, share, 0) : Tensor{},
            ctx.needs_grad(1) ? where(equal, index_select(share, 0, rows), 0) : Tensor{}, Tensor{}};
  }
};

// The derivative by a factor is the product of the others: that of all nonzero ones, divided by this one unless it is
// 0, or 0 if another one is 0.
struct ScatterProduct {
  static constexpr bool composed = true;

  Tensor forward(autograd::Context& ctx, const Tensor& x, const Tensor& src, const Tensor& rows) const {
    ctx.save_for_backward(x, src, rows);
    return combined_at(Combination::product, x, src, rows);
  }
  Tensors backward(autograd::Context& ctx, const Tensor& dy) const {
    const auto [x, src, rows] = ctx.saved<3>();
    const Tensor zero = eq(src, 0), self_zero = eq(x, 0);
    const Tensor zeros = index_add(self_zero.to(int32), 0, rows, zero.to(int32));
    const Tensor factor = where(zero, 1, src), self_factor = where(self_zero, 1, x);
    const Tensor product = autograd::apply(ScatterProduct{}, self_factor, factor, rows);
    const Tensor t = dy * product;
    Tensors gradients(3);
    if (ctx.needs_grad(0)) {
      gradients[0] = where(eq(zeros, self_zero.to(int32)), t / self_factor, 0);
    }
    if (ctx.needs_grad(1)) {
      const Tensor others_nonzero = eq(index_select(zeros, 0, rows), zero.to(int32));
      gradients[1] = where(others_nonzero, index_select(t, 0, rows) / factor, 0);
    }
    return gradients;
  }
};

Tensor scatter_mean(const Tensor& x, const Tensor& src, const Tensor& rows, bool include_self) {
  const DType wide = accumulate_dtype(x.dtype());
  const Tensor hits = hits_of(x, rows, wide);
  const Tensor start = include_self ? x.to(wide) : where(gt(hits, 0), 0, x.to(wide));
  const Tensor sums = index_add(start, 0, rows, src.to(wide));
  const Tensor count = include_self ? hits + 1 : maximum(hits, 1);
  return (is_floating(wide) ? sums / count : floor_divide(sums, count)).to(x.dtype());
}

Tensor scatter_reduced(const Tensor& x, const Tensor& src, const Tensor& rows, ScatterReduction reduction,
                       bool include_self) {
  switch (reduction) {
    case ScatterReduction::sum: return index_add(include_self ? x : where(is_hit(x, rows), 0, x), 0, rows, src);
    case ScatterReduction::mean: return scatter_mean(x, src, rows, include_self);
    case ScatterReduction::prod: {
      const DType wide = accumulate_dtype(x.dtype());
      const Tensor start = include_self ? x : where(is_hit(x, rows), 1, x);
      return autograd::apply(ScatterProduct{}, start.to(wide), src.to(wide), rows).to(x.dtype());
    }
    case ScatterReduction::amax: return autograd::apply(ScatterExtreme{true, include_self}, x, src, rows);
    case ScatterReduction::amin: break;
  }
  return autograd::apply(ScatterExtreme{false, include_self}, x, src, rows);
}

// Calls f(x, src, rows) with flattened tensors; x is the part that the index covers, the rest of it stays as it is.
template <class F>
Tensor scattered(const char* op, const Tensor& x, int axis, const Tensor& index, const Tensor& src, const F& f) {
  const Shape& shape = index.shape();
  for (int i = 0; i < x.dim(); ++i) {
    if (i != axis && shape[i] < x.shape()[i]) {
      const Tensor front = slice(x, i, 0, shape[i]);
      return cat({scattered(op, front, axis, index, src, f), slice(x, i, shape[i], x.shape()[i])}, i);
    }
  }
  const Tensor rows = detail::rows_of_elements(op, x.shape(), axis, index);
  const Tensor used = detail::cut_to(src, shape, -1);
  return reshape(f(reshape(x, {x.numel()}), reshape(used, {used.numel()}), rows), x.shape());
}

Tensor reduced_along(const char* op, const Tensor& x, int axis, const Tensor& index, const Tensor& src,
                     ScatterReduction reduction, bool include_self) {
  check(reduction <= ScatterReduction::amin, "{}: expected one of the enumerators of ScatterReduction, got {}", op,
        static_cast<int>(reduction));
  check(x.dtype() != boolean, "{}: expected a numeric dtype, got bool", op);
  detail::check_scattered(op, x, axis, index, src);
  return scattered(op, x, axis, index, src, [&](const Tensor& flat, const Tensor& elements, const Tensor& rows) {
    return scatter_reduced(flat, elements, rows, reduction, include_self);
  });
}

}  // namespace

Tensor scatter(const Tensor& x, std::int64_t axis, const Tensor& index, const Tensor& src) {
  const int at = normalize_axis(axis, x.dim(), "scatter");
  const Tensor positions = detail::checked_index("scatter", x, index);
  detail::check_scattered("scatter", x, at, positions, src);
  return scattered("scatter", x, at, positions, src,
                   [](const Tensor& flat, const Tensor& elements, const Tensor& rows) {
                     return autograd::apply(Replace{}, flat, elements, rows);
                   });
}

Tensor scatter(const Tensor& x, std::int64_t axis, const Tensor& index, double value) {
  return scatter(x, axis, index, full(index.shape(), value, x.dtype(), x.device()));
}

Tensor scatter_reduce(const Tensor& x, std::int64_t axis, const Tensor& index, const Tensor& src,
                      ScatterReduction reduction, bool include_self) {
  const int at = normalize_axis(axis, x.dim(), "scatter_reduce");
  return reduced_along("scatter_reduce", x, at, detail::checked_index("scatter_reduce", x, index), src, reduction,
                       include_self);
}

Tensor index_reduce(const Tensor& x, std::int64_t axis, const Tensor& index, const Tensor& src,
                    ScatterReduction reduction, bool include_self) {
  const int at = normalize_axis(axis, x.dim(), "index_reduce");
  check(index.dim() == 1, "index_reduce: expected an index of one axis, got shape {}", index.shape());
  Shape shape = x.shape();
  shape[at] = index.numel();
  check(src.shape() == shape, "index_reduce: expected src of shape {}, got {}", shape, src.shape());
  Shape line = Shape::filled(x.dim(), 1);
  line[at] = index.numel();
  const Tensor of_slices = detail::checked_index("index_reduce", x, index);
  const Tensor of_elements = contiguous_data(broadcast_view(reshape(of_slices, line), shape));
  return reduced_along("index_reduce", x, at, of_elements, src, reduction, include_self);
}

}  // namespace mica

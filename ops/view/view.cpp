#include <algorithm>
#include <optional>

#include <mica/autograd/detail/inplace.h>
#include <mica/autograd/function.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/ops/reduce/sum.h>
#include <mica/ops/view/view.h>

namespace mica {

namespace {

using autograd::apply;
using autograd::Context;

std::int64_t offset_of(const Tensor& x) { return x.handle()->offset; }

// The strides of a view of x with shape `shape`, if there can be one. Adjacent axes of x that are contiguous in memory
// form a run. Within a run, axes can be merged and split at will, but an axis of the result cannot span two runs.
std::optional<Strides> strides_under(const Tensor& x, const Shape& shape) {
  if (x.is_contiguous()) {
    return contiguous_strides(shape);
  }
  Strides strides = Strides::filled(shape.size(), 1);
  int to = shape.size() - 1;
  int from = x.dim() - 1;
  while (from >= 0) {
    if (x.shape()[from] == 1) {
      --from;
      continue;
    }
    const std::int64_t step = x.strides()[from];
    std::int64_t run = 1;
    while (from >= 0 && (x.shape()[from] == 1 || x.strides()[from] == step * run)) {
      run *= x.shape()[from--];
    }
    std::int64_t covered = 1;
    while (to >= 0 && covered < run) {
      strides[to] = step * covered;
      covered *= shape[to--];
    }
    if (covered != run) {
      return std::nullopt;
    }
  }
  return strides;
}

// Runs a view op and registers its result as a view of x, so that a recorded in-place write to either updates the
// history of the other.
template <class F>
Tensor apply_view(F op, const Tensor& x) {
  const Tensor result = apply(std::move(op), x);
  autograd::link_view(result, x);
  return result;
}

struct Clone {
  static constexpr bool composed = true;

  Tensor forward(Context&, const Tensor& x) const {
    const Tensor copy = empty_like(x);
    copy_into(copy, x);
    return copy;
  }
  Tensor backward(Context&, const Tensor& dy) const { return dy; }
};

struct Reshape {
  static constexpr bool composed = true;
  Shape to;
  Shape from;

  Tensor forward(Context&, const Tensor& x) const {
    const std::optional<Strides> strides = strides_under(x, to);
    if (strides) {
      return as_strided(x, to, *strides, offset_of(x));
    }
    const Tensor copy = contiguous_data(x);
    return as_strided(copy, to, contiguous_strides(to), offset_of(copy));
  }
  Tensor backward(Context&, const Tensor& dy) const { return reshape(dy, from); }
};

struct Permute {
  static constexpr bool composed = true;
  Dims axes;

  Tensor forward(Context&, const Tensor& x) const {
    Shape shape = axes;
    Strides strides = axes;
    for (int i = 0; i < axes.size(); ++i) {
      shape[i] = x.shape()[static_cast<int>(axes[i])];
      strides[i] = x.strides()[static_cast<int>(axes[i])];
    }
    return as_strided(x, shape, strides, offset_of(x));
  }
  Tensor backward(Context&, const Tensor& dy) const {
    Dims back = axes;
    for (int i = 0; i < axes.size(); ++i) {
      back[static_cast<int>(axes[i])] = i;
    }
    return permute(dy, back);
  }
};

// Writes x into a part of a tensor of zeros: the gradient of slice and select. Differentiable.
struct SliceGradient {
  static constexpr bool composed = true;
  Shape shape;
  int axis;
  std::int64_t start, count, step;

  Tensor forward(Context&, const Tensor& part) const;
  Tensor backward(Context&, const Tensor& dy) const;
};

struct Slice {
  static constexpr bool composed = true;
  int axis;
  std::int64_t start, count, step;
  Shape from;

  Tensor forward(Context&, const Tensor& x) const {
    Shape shape = x.shape();
    Strides strides = x.strides();
    shape[axis] = count;
    if (count > 1) {  // otherwise the stride has no effect, and the product might overflow
      strides[axis] *= step;
    }
    return as_strided(x, shape, strides, offset_of(x) + (count > 0 ? start * x.strides()[axis] : 0));
  }
  Tensor backward(Context&, const Tensor& dy) const { return apply(SliceGradient{from, axis, start, count, step}, dy); }
};

Tensor SliceGradient::forward(Context& ctx, const Tensor& part) const {
  const Tensor whole = zeros(shape, part.dtype(), part.device());
  copy_into(Slice{axis, start, count, step, shape}.forward(ctx, whole), part);
  return whole;
}

Tensor SliceGradient::backward(Context&, const Tensor& dy) const {
  return apply(Slice{axis, start, count, step, shape}, dy);
}

struct Expand {
  static constexpr bool composed = true;
  Shape to;
  Shape from;

  Tensor forward(Context&, const Tensor& x) const { return broadcast_view(x, to); }
  Tensor backward(Context&, const Tensor& dy) const { return sum_to(dy, from); }
};

}  // namespace

Tensor contiguous(const Tensor& x) { return x.is_contiguous() ? x : clone(x); }

Tensor clone(const Tensor& x) { return apply(Clone{}, x); }

Tensor reshape(const Tensor& x, const Shape& shape) {
  Shape to = shape;
  int unknown = -1;
  for (int axis = 0; axis < to.size(); ++axis) {
    check(to[axis] >= 0 || (to[axis] == -1 && unknown < 0),
          "reshape: expected sizes of at least 0 and at most one -1, got {}", shape);
    if (to[axis] == -1) {
      unknown = axis;
      to[axis] = 1;
    }
  }
  const std::int64_t known = numel_of(to);
  if (unknown >= 0) {
    check(known > 0 && x.numel() % known == 0, "reshape: cannot reshape {} elements of shape {} to {}", x.numel(),
          x.shape(), shape);
    to[unknown] = x.numel() / known;
  } else {
    check(known == x.numel(), "reshape: cannot reshape {} elements of shape {} to {}", x.numel(), x.shape(), shape);
  }
  return to == x.shape() ? x : apply_view(Reshape{to, x.shape()}, x);
}

Tensor view(const Tensor& x, const Shape& shape) {
  const Tensor result = reshape(x, shape);
  check(result.handle()->storage == x.handle()->storage,
        "view: shape {} with strides {} cannot be viewed as {} without a copy; use reshape", x.shape(), x.strides(),
        shape);
  return result;
}

Tensor flatten(const Tensor& x, std::int64_t from, std::int64_t to) {
  if (x.dim() == 0) {
    return reshape(x, {1});
  }
  const int first = normalize_axis(from, x.dim(), "flatten");
  const int last = normalize_axis(to, x.dim(), "flatten");
  check(first <= last, "flatten: expected from ≤ to, got axes {} and {}", from, to);
  Shape shape = x.shape().slice(0, first);
  shape.push_back(numel_of(x.shape().slice(first, last + 1)));
  for (int axis = last + 1; axis < x.dim(); ++axis) {
    shape.push_back(x.shape()[axis]);
  }
  return reshape(x, shape);
}

Tensor permute(const Tensor& x, const Dims& axes) {
  check(axes.size() == x.dim(), "permute: expected {} axes, got {}", x.dim(), axes);
  Dims order = axes;
  std::array<bool, kMaxRank> used{};
  for (std::int64_t& axis : order) {
    axis = normalize_axis(axis, x.dim(), "permute");
    check(!used[static_cast<std::size_t>(axis)], "permute: expected every axis once, got {}", axes);
    used[static_cast<std::size_t>(axis)] = true;
  }
  return apply_view(Permute{order}, x);
}

Tensor transpose(const Tensor& x, std::int64_t a, std::int64_t b) {
  Dims order = x.shape();
  for (int axis = 0; axis < order.size(); ++axis) {
    order[axis] = axis;
  }
  std::swap(order[normalize_axis(a, x.dim(), "transpose")], order[normalize_axis(b, x.dim(), "transpose")]);
  return apply_view(Permute{order}, x);
}

Tensor slice(const Tensor& x, std::int64_t axis, std::int64_t start, std::int64_t end, std::int64_t step) {
  const int at = normalize_axis(axis, x.dim(), "slice");
  check(step >= 1, "slice: expected a step of at least 1, got {}", step);
  const std::int64_t size = x.shape()[at];
  const std::int64_t first = std::clamp<std::int64_t>(start < 0 ? start + size : start, 0, size);
  const std::int64_t last = std::clamp<std::int64_t>(end < 0 ? end + size : end, first, size);
  const std::int64_t count = (last - first) / step + ((last - first) % step > 0 ? 1 : 0);
  return apply_view(Slice{at, first, count, step, x.shape()}, x);
}

Tensor select(const Tensor& x, std::int64_t axis, std::int64_t index) {
  const int at = normalize_axis(axis, x.dim(), "select");
  const std::int64_t size = x.shape()[at];
  check(index >= -size && index < size, "select: expected an index in [{}, {}), got {}", -size, size, index);
  const std::int64_t position = index < 0 ? index + size : index;
  return squeeze(slice(x, at, position, position + 1), at);
}

Tensor expand(const Tensor& x, const Shape& shape) {
  Shape to = shape;
  const int added = shape.size() - x.dim();
  check(added >= 0, "expand: expected at least {} axes, got shape {}", x.dim(), shape);
  for (int axis = 0; axis < to.size(); ++axis) {
    if (to[axis] == -1) {
      check(axis >= added, "expand: expected a length for each new axis, got -1 in {}", shape);
      to[axis] = x.shape()[axis - added];
    }
  }
  return to == x.shape() ? x : apply_view(Expand{to, x.shape()}, x);
}

Tensor squeeze(const Tensor& x, std::int64_t axis) {
  const int at = normalize_axis(axis, x.dim(), "squeeze");
  if (x.shape()[at] != 1) {
    return x;
  }
  Shape shape = x.shape();
  shape.erase(at);
  return reshape(x, shape);
}

Tensor squeeze(const Tensor& x) {
  Shape shape;
  for (const std::int64_t size : x.shape()) {
    if (size != 1) {
      shape.push_back(size);
    }
  }
  return reshape(x, shape);
}

Tensor unsqueeze(const Tensor& x, std::int64_t axis) {
  Shape shape = x.shape();
  shape.insert(normalize_axis(axis, x.dim() + 1, "unsqueeze"), 1);
  return reshape(x, shape);
}

Tensors split(const Tensor& x, std::int64_t size, std::int64_t axis) {
  const int at = normalize_axis(axis, x.dim(), "split");
  check(size >= 1, "split: expected parts of at least 1, got {}", size);
  Tensors parts;
  const std::int64_t length = x.shape()[at];
  std::int64_t start = 0;
  do {
    const std::int64_t end = start + std::min(size, length - start);
    parts.push_back(slice(x, at, start, end));
    start = end;
  } while (start < length);
  return parts;
}

Tensors split(const Tensor& x, const std::vector<std::int64_t>& sizes, std::int64_t axis) {
  const int at = normalize_axis(axis, x.dim(), "split");
  std::int64_t end = 0;
  for (const std::int64_t size : sizes) {
    check(size >= 0, "split: expected sizes of at least 0, got {}", size);
    check(size <= x.shape()[at] - end, "split: expected sizes that add up to {}, got more", x.shape()[at]);
    end += size;
  }
  check(end == x.shape()[at], "split: expected sizes that add up to {}, got {}", x.shape()[at], end);
  Tensors parts;
  std::int64_t start = 0;
  for (const std::int64_t size : sizes) {
    parts.push_back(slice(x, at, start, start + size));
    start += size;
  }
  return parts;
}

}  // namespace mica

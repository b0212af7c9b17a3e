#include <algorithm>

#include <mica/autograd/detail/inplace.h>
#include <mica/autograd/function.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/ops/diagonal/diagonal.h>
#include <mica/ops/reduce/sum.h>
#include <mica/ops/view/view.h>

namespace mica {

namespace {

// A diagonal of the matrices in the axes a and b of a tensor of shape `shape`.
struct DiagonalPlace {
  Shape shape;
  int a, b;
  std::int64_t offset;

  std::int64_t length() const {
    const std::int64_t rows = shape[a] + std::min<std::int64_t>(offset, 0);
    const std::int64_t columns = shape[b] - std::max<std::int64_t>(offset, 0);
    return std::max<std::int64_t>(std::min(rows, columns), 0);
  }

  Tensor view_of(const Tensor& x) const {
    Shape sizes;
    Strides strides;
    for (int axis = 0; axis < shape.size(); ++axis) {
      if (axis != a && axis != b) {
        sizes.push_back(shape[axis]);
        strides.push_back(x.strides()[axis]);
      }
    }
    sizes.push_back(length());
    strides.push_back(x.strides()[a] + x.strides()[b]);
    const std::int64_t start = offset < 0 ? -offset * x.strides()[a] : offset * x.strides()[b];
    return as_strided(x, sizes, strides, x.handle()->offset + (length() > 0 ? start : 0));
  }
};

struct Diagonal {
  static constexpr bool composed = true;
  DiagonalPlace place;

  Tensor forward(autograd::Context&, const Tensor& x) const { return place.view_of(x); }
  Tensor backward(autograd::Context&, const Tensor& dy) const;
};

// Writes x to a diagonal of a tensor of zeros.
struct DiagonalGradient {
  static constexpr bool composed = true;
  DiagonalPlace place;

  Tensor forward(autograd::Context&, const Tensor& x) const {
    const Tensor whole = zeros(place.shape, x.dtype(), x.device());
    copy_into(place.view_of(whole), x);
    return whole;
  }
  Tensor backward(autograd::Context&, const Tensor& dy) const { return autograd::apply(Diagonal{place}, dy); }
};

Tensor Diagonal::backward(autograd::Context&, const Tensor& dy) const {
  return autograd::apply(DiagonalGradient{place}, dy);
}

}  // namespace

Tensor diagonal(const Tensor& x, std::int64_t offset, std::int64_t a, std::int64_t b) {
  const int rows = normalize_axis(a, x.dim(), "diagonal"), columns = normalize_axis(b, x.dim(), "diagonal");
  check(rows != columns, "diagonal: expected two different axes, got {} and {}", a, b);
  const std::int64_t within = std::clamp(offset, -x.shape()[rows], x.shape()[columns]);
  const Tensor y = autograd::apply(Diagonal{{x.shape(), rows, columns, within}}, x);
  autograd::link_view(y, x);
  return y;
}

Tensor diag_embed(const Tensor& x, std::int64_t offset) {
  check(x.dim() >= 1, "diag_embed: expected at least one axis, got a scalar");
  constexpr std::int64_t kMost = std::int64_t{1} << 31;
  check(offset >= -kMost && offset <= kMost, "diag_embed: expected an offset from -2³¹ to 2³¹, got {}", offset);
  Shape shape = x.shape();
  shape.back() += std::abs(offset);
  shape.push_back(shape.back());
  return autograd::apply(DiagonalGradient{{shape, x.dim() - 1, x.dim(), offset}}, x);
}

Tensor diag(const Tensor& x, std::int64_t offset) {
  check(x.dim() == 1 || x.dim() == 2, "diag: expected a vector or a matrix, got shape {}", x.shape());
  return x.dim() == 1 ? diag_embed(x, offset) : clone(diagonal(x, offset));
}

Tensor trace(const Tensor& x) {
  check(x.dim() == 2, "trace: expected a matrix, got shape {}", x.shape());
  return sum(diagonal(x));
}

}  // namespace mica

#include <array>

#include <mica/autograd/function.h>
#include <mica/core/dispatch.h>
#include <mica/ops/reduce/detail/reduce_kernels.h>
#include <mica/ops/reduce/detail/shapes.h>
#include <mica/ops/reduce/sum.h>
#include <mica/ops/view/view.h>

namespace mica {

namespace reduction {

Shapes reduced_shapes(const Tensor& x, const Dims& axes, bool keepdim, const char* op) {
  std::array<bool, kMaxRank> reduced{};
  for (const std::int64_t axis : axes) {
    const int i = normalize_axis(axis, x.dim(), op);
    check(!reduced[i], "{}: expected each axis once, got {}", op, axes);
    reduced[i] = true;
  }
  Shapes shapes{.kept = x.shape(), .result = {}};
  for (int i = 0; i < x.dim(); ++i) {
    const std::int64_t size = x.shape()[i];
    if (reduced[i] || axes.empty()) {
      shapes.kept[i] = 1;
      shapes.count *= size;
    }
    if (keepdim || !(reduced[i] || axes.empty())) {
      shapes.result.push_back(shapes.kept[i]);
    }
  }
  return shapes;
}

Tensor viewed_as(const Tensor& x, const Shape& shape) {
  return as_strided(x, shape, contiguous_strides(shape), x.handle()->offset);
}

namespace {

/// Σ x / divisor
Tensor scaled_sum(const Tensor& x, const Shapes& shapes, double divisor) {
  const Tensor y = empty(shapes.result, is_floating(x.dtype()) ? x.dtype() : int64, x.device());
  const Tensor kept = viewed_as(y, shapes.kept);
  const kernels::Sum args{.x = x, .divisor = divisor, .y = kept};
  on_device(x.device(), [&](auto device) { kernels::sum(device, args); });
  return y;
}

struct Sum {
  static constexpr bool composed = true;
  Shape in;
  Shapes shapes;

  Tensor forward(autograd::Context&, const Tensor& x) const { return scaled_sum(x, shapes, 1); }
  Tensor backward(autograd::Context&, const Tensor& dy) const { return expand(reshape(dy, shapes.kept), in); }
};

struct Mean {
  static constexpr bool composed = true;
  Shape in;
  Shapes shapes;

  Tensor forward(autograd::Context&, const Tensor& x) const {
    return scaled_sum(x, shapes, static_cast<double>(shapes.count));
  }
  Tensor backward(autograd::Context&, const Tensor& dy) const {
    // A mean over no axes, with the same divisor, computes dy / count.
    const Shapes same{.kept = dy.shape(), .result = dy.shape(), .count = shapes.count};
    return expand(reshape(autograd::apply(Mean{dy.shape(), same}, dy), shapes.kept), in);
  }
};

}  // namespace

Tensor sum_over(const Tensor& x, const Shapes& shapes) { return autograd::apply(Sum{x.shape(), shapes}, x); }

Tensor mean_over(const Tensor& x, const Shapes& shapes) { return autograd::apply(Mean{x.shape(), shapes}, x); }

}  // namespace reduction

Tensor sum(const Tensor& x, const Dims& axes, bool keepdim) {
  return reduction::sum_over(x, reduction::reduced_shapes(x, axes, keepdim, "sum"));
}

Tensor mean(const Tensor& x, const Dims& axes, bool keepdim) {
  check(is_floating(x.dtype()), "mean: expected a floating dtype, got {}", x.dtype());
  return reduction::mean_over(x, reduction::reduced_shapes(x, axes, keepdim, "mean"));
}

Tensor sum_to(const Tensor& x, const Shape& shape) {
  if (x.shape() == shape) {
    return x;
  }
  const int added = x.dim() - shape.size();
  check(added >= 0, "sum_to: expected a shape that broadcasts to {}, got {}", x.shape(), shape);
  reduction::Shapes shapes{.kept = Shape::filled(added, 1), .result = shape};
  for (int i = 0; i < shape.size(); ++i) {
    check(shape[i] == 1 || shape[i] == x.shape()[added + i], "sum_to: expected a shape that broadcasts to {}, got {}",
          x.shape(), shape);
    shapes.kept.push_back(shape[i]);
  }
  return reduction::sum_over(x, shapes);
}

}  // namespace mica

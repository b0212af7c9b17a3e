#include <mica/autograd/function.h>
#include <mica/core/copy.h>
#include <mica/core/dispatch.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/reduce/reduce_kernels.h>

namespace mica {

namespace {

/// The shapes of a reduction's result: with the reduced axes of length 1, and as the caller wants it.
struct Shapes {
  Shape kept;
  Shape result;
  std::int64_t count = 1;  // elements that go into one result
};

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

void check_floating(const Tensor& x, const char* op) {
  check(is_floating(x.dtype()), "{}: expected a floating dtype, got {}", op, x.dtype());
}

/// A row-major tensor seen in another shape of as many elements.
Tensor seen_as(const Tensor& x, const Shape& shape) {
  return as_strided(x, shape, contiguous_strides(shape), x.handle()->offset);
}

/// Σ x / divisor
Tensor scaled_sum(const Tensor& x, const Shapes& shapes, double divisor) {
  const Tensor y = empty(shapes.result, is_floating(x.dtype()) ? x.dtype() : int64, x.device());
  const Tensor kept = seen_as(y, shapes.kept);
  const kernels::Sum args{.x = x, .divisor = divisor, .y = kept};
  on_device(x.device(), [&](auto device) { kernels::sum(device, args); });
  return y;
}

/// dy, as the reduction gave it, spread over the shape of its input.
Tensor spread(const Tensor& dy, const Shapes& shapes, const Shape& in) {
  return broadcast_view(seen_as(contiguous_data(dy), shapes.kept), in);
}

struct Sum {
  Shape in;
  Shapes shapes;

  Tensor forward(autograd::Context&, const Tensor& x) const { return scaled_sum(x, shapes, 1); }
  Tensor backward(autograd::Context&, const Tensor& dy) const { return spread(dy, shapes, in); }
};

struct Mean {
  Shape in;
  Shapes shapes;

  Tensor forward(autograd::Context&, const Tensor& x) const {
    return scaled_sum(x, shapes, static_cast<double>(shapes.count));
  }
  Tensor backward(autograd::Context&, const Tensor& dy) const {
    const Shapes same{.kept = dy.shape(), .result = dy.shape()};
    return spread(scaled_sum(dy, same, static_cast<double>(shapes.count)), shapes, in);
  }
};

}  // namespace

Tensor sum(const Tensor& x, const Dims& axes, bool keepdim) {
  return autograd::apply(Sum{x.shape(), reduced_shapes(x, axes, keepdim, "sum")}, x);
}

Tensor mean(const Tensor& x, const Dims& axes, bool keepdim) {
  check_floating(x, "mean");
  return autograd::apply(Mean{x.shape(), reduced_shapes(x, axes, keepdim, "mean")}, x);
}

Tensor sum_to(const Tensor& x, const Shape& shape) {
  if (x.shape() == shape) {
    return x;
  }
  const int added = x.dim() - shape.size();
  check(added >= 0, "sum_to: expected a shape that broadcasts to {}, got {}", x.shape(), shape);
  Shapes shapes{.kept = Shape::filled(added, 1), .result = shape};
  for (int i = 0; i < shape.size(); ++i) {
    check(shape[i] == 1 || shape[i] == x.shape()[added + i], "sum_to: expected a shape that broadcasts to {}, got {}",
          x.shape(), shape);
    shapes.kept.push_back(shape[i]);
  }
  return autograd::apply(Sum{x.shape(), shapes}, x);
}

}  // namespace mica

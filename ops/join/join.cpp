#include <mica/autograd/function.h>
#include <mica/core/copy.h>
#include <mica/ops/join/join.h>
#include <mica/ops/view/view.h>

namespace mica {

namespace {

struct Cat {
  static constexpr bool composed = true;
  int axis;
  std::vector<std::int64_t> sizes;  // of each input along the axis

  Tensor forward(autograd::Context&, const Tensors& tensors) const {
    Shape shape = tensors[0].shape();
    shape[axis] = 0;
    for (const std::int64_t size : sizes) {
      shape[axis] += size;
    }
    const Tensor y = empty(shape, tensors[0].dtype(), tensors[0].device());
    std::int64_t start = 0;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      copy_into(slice(y, axis, start, start + sizes[i]), tensors[i]);
      start += sizes[i];
    }
    return y;
  }

  Tensors backward(autograd::Context& ctx, const Tensor& dy) const {
    Tensors gradients(sizes.size());
    std::int64_t start = 0;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      if (ctx.needs_grad(i)) {
        gradients[i] = slice(dy, axis, start, start + sizes[i]);
      }
      start += sizes[i];
    }
    return gradients;
  }
};

}  // namespace

Tensor cat(const Tensors& tensors, std::int64_t axis) {
  check(!tensors.empty(), "cat: expected at least one tensor");
  const Tensor& first = tensors[0];
  const int at = normalize_axis(axis, first.dim(), "cat");
  Cat function{.axis = at, .sizes = {}};
  std::int64_t total = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& x = tensors[i];
    check(x.dtype() == first.dtype() && x.device() == first.device(),
          "cat: expected {} on {}, got {} on {} as tensor {}", first.dtype(), first.device(), x.dtype(), x.device(), i);
    Shape shape = x.shape();
    if (shape.size() == first.dim()) {
      shape[at] = first.shape()[at];
    }
    check(shape == first.shape(), "cat: expected shape {} except for axis {}, got {} as tensor {}", first.shape(), at,
          x.shape(), i);
    check(!__builtin_add_overflow(total, x.shape()[at], &total),
          "cat: the sizes of axis {} of {} tensors add up to more than 63 bits", at, tensors.size());
    function.sizes.push_back(x.shape()[at]);
  }
  return autograd::apply(std::move(function), tensors);
}

Tensor stack(const Tensors& tensors, std::int64_t axis) {
  check(!tensors.empty(), "stack: expected at least one tensor");
  Tensors rows;
  for (const Tensor& x : tensors) {
    check(x.shape() == tensors[0].shape(), "stack: expected shape {}, got {}", tensors[0].shape(), x.shape());
    rows.push_back(unsqueeze(x, axis));
  }
  return cat(rows, normalize_axis(axis, tensors[0].dim() + 1, "stack"));
}

}  // namespace mica

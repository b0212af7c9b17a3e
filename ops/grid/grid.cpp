#include <cmath>

#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/detail/number.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/grid/grid.h>
#include <mica/ops/view/view.h>

namespace mica {

namespace {

// f of the numbers of linspace(), converted to `dtype`.
template <class F>
Tensor spaced(const char* op, double start, double end, std::int64_t count, DType dtype, Device device, const F& f) {
  check(count >= 0, "{}: expected a count of at least 0, got {}", op, count);
  check(std::isfinite(start) && std::isfinite(end), "{}: expected finite bounds, got {} and {}", op, start, end);
  const Tensor values = empty({count}, float64);
  double* const data = values.data<double>();
  const double step = count > 1 ? (end - start) / static_cast<double>(count - 1) : 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const bool from_start = i < count / 2 || count == 1;
    const double value =
        from_start ? start + step * static_cast<double>(i) : end - step * static_cast<double>(count - 1 - i);
    data[i] = is_floating(dtype) ? f(value) : std::trunc(f(value));
  }
  if (count > 0) {  // all others are between these
    detail::check_number(data[0], dtype, op);
    detail::check_number(data[count - 1], dtype, op);
  }
  const Tensor x = empty({count}, dtype, device);
  copy_into(x, values);
  return x;
}

}  // namespace

Tensor linspace(double start, double end, std::int64_t count, DType dtype, Device device) {
  return spaced("linspace", start, end, count, dtype, device, [](double value) { return value; });
}

Tensor logspace(double start, double end, std::int64_t count, double base, DType dtype, Device device) {
  check(is_floating(dtype) || base > 0, "logspace: expected a base above 0 for {}, got {}", dtype, base);
  return spaced("logspace", start, end, count, dtype, device, [base](double value) { return std::pow(base, value); });
}

Tensor eye(std::int64_t rows, std::int64_t columns, DType dtype, Device device) {
  check(rows >= 0 && columns >= 0, "eye: expected sizes of at least 0, got {} and {}", rows, columns);
  const Tensor row = arange(static_cast<double>(rows), int64, device);
  const Tensor column = arange(static_cast<double>(columns), int64, device);
  return eq(unsqueeze(row, 1), column).to(dtype);
}

Tensor eye(std::int64_t rows, DType dtype, Device device) { return eye(rows, rows, dtype, device); }

Tensors meshgrid(const Tensors& tensors) {
  check(!tensors.empty(), "meshgrid: expected at least one tensor");
  Shape shape;
  for (const Tensor& x : tensors) {
    check(x.dim() <= 1, "meshgrid: expected tensors of one axis, got shape {}", x.shape());
    check(x.dtype() == tensors[0].dtype() && x.device() == tensors[0].device(),
          "meshgrid: expected {} on {}, got {} on {}", tensors[0].dtype(), tensors[0].device(), x.dtype(), x.device());
    shape.push_back(x.numel());
  }
  Tensors grids;
  for (int axis = 0; axis < shape.size(); ++axis) {
    Shape line = Shape::filled(shape.size(), 1);
    line[axis] = shape[axis];
    grids.push_back(expand(reshape(tensors[static_cast<std::size_t>(axis)], line), shape));
  }
  return grids;
}

}  // namespace mica

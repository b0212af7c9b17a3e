#include <mica/autograd/function.h>
#include <mica/core/capture.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/embedding/detail/embedding_kernels.h>
#include <mica/ops/index/detail/gather_for.h>
#include <mica/ops/index/detail/index_kernels.h>
#include <mica/ops/index/index.h>
#include <mica/ops/join/join.h>
#include <mica/ops/view/view.h>

namespace mica {

namespace {

// Every op here consists of TakeRows and AddRows, which view a row-major tensor as a table with rows of `width`
// adjacent elements, and copy rows out of it or add rows to it.

Tensor as_rows(const Tensor& x, std::int64_t width) {
  const std::int64_t rows = width == 0 ? 0 : x.numel() / width;
  return as_strided(x, {rows, width}, {width, 1}, x.handle()->offset);
}

struct Transfer {
  const char* op;
  Shape table;         // the shape of the table
  Shape taken;         // the shape of the rows that are taken from it or added to it
  std::int64_t width;  // elements per row
};

struct AddRows;

// y = x[rows]
struct TakeRows : Transfer {
  static constexpr bool composed = true;

  Tensor forward(autograd::Context& ctx, const Tensor& x, const Tensor& rows) const {
    const Tensor y = empty(taken, x.dtype(), x.device());
    if (y.numel() > 0) {
      const Tensor from = as_rows(contiguous_data(x), width), to = as_rows(y, width);
      const kernels::EmbeddingForward args{.weight = from, .indices = rows, .y = to, .op = op};
      on_device(x.device(), [&](auto device) { kernels::embedding_forward(device, args); });
    }
    ctx.save_for_backward(rows);
    return y;
  }
  Tensors backward(autograd::Context& ctx, const Tensor& dy) const;
};

// y = x, then y[rows] += src. If x is undefined, y starts with zeros.
struct AddRows : Transfer {
  static constexpr bool composed = true;

  Tensor forward(autograd::Context& ctx, const Tensor& x, const Tensor& src, const Tensor& rows) const {
    Tensor y;
    if (x.defined()) {
      y = empty(table, src.dtype(), src.device());
      copy_into(y, x);
    } else {
      y = zeros(table, src.dtype(), src.device());
    }
    if (src.numel() > 0) {
      const Tensor from = as_rows(contiguous_data(src), width), to = as_rows(y, width);
      const kernels::EmbeddingBackward args{.dy = from, .indices = rows, .dweight = to, .accumulate = true, .op = op};
      on_device(y.device(), [&](auto device) { kernels::embedding_backward(device, args); });
    }
    ctx.save_for_backward(rows);
    return y;
  }
  Tensors backward(autograd::Context& ctx, const Tensor& dy) const {
    Tensors gradients(3);
    if (ctx.needs_grad(0)) {
      gradients[0] = dy;
    }
    if (ctx.needs_grad(1)) {
      gradients[1] = autograd::apply(TakeRows{*this}, dy, ctx.saved<1>()[0]);
    }
    return gradients;
  }
};

Tensors TakeRows::backward(autograd::Context& ctx, const Tensor& dy) const {
  return {autograd::apply(AddRows{*this}, Tensor{}, dy, ctx.saved<1>()[0]), {}};
}

void check_source(const char* op, const Tensor& x, const Tensor& src) {
  check(src.dtype() == x.dtype(), "{}: expected src of {}, got {}", op, x.dtype(), src.dtype());
  check(src.device() == x.device(), "{}: expected src on {}, got {}", op, x.device(), src.device());
  // Throws for unsupported dtypes here, so that a call without elements throws, too.
  on_dtype(kernels::SummedTypes{}, x.dtype(), op, []<class T>() {});
}

std::int64_t product(const Shape& shape, int begin, int end) {
  std::int64_t result = 1;
  for (int i = begin; i < end; ++i) {
    result *= shape[i];
  }
  return result;
}

// For an index of one axis: the rows that its entries refer to, where a row is a slice over the axes after `axis`.
Tensor rows_of_slices(const char* op, const Shape& shape, int axis, const Tensor& index) {
  const std::int64_t outer = product(shape, 0, axis);
  const Tensor rows = empty({outer * index.numel()}, int64, index.device());
  const kernels::IndexRows args{.index = index,
                                .outer = outer,
                                .size = shape[axis],
                                .length = index.numel(),
                                .inner = 1,
                                .shared = true,
                                .rows = rows,
                                .op = op};
  if (index.numel() > 0) {
    on_device(index.device(), [&](auto device) { kernels::index_rows(device, args); });
  }
  return rows;
}

Tensor checked_slices(const char* op, const Tensor& x, const Tensor& index) {
  check(index.dim() == 1, "{}: expected an index of one axis, got shape {}", op, index.shape());
  return detail::checked_index(op, x, index);
}

}  // namespace

namespace detail {

Tensor checked_index(const char* op, const Tensor& x, const Tensor& index) {
  check(index.dtype() == int64 || index.dtype() == int32, "{}: expected an index of int64 or int32, got {}", op,
        index.dtype());
  check(index.device() == x.device(), "{}: expected an index on {}, got {}", op, x.device(), index.device());
  return contiguous_data(index.to(int64));
}

Tensor rows_of_elements(const char* op, const Shape& shape, int axis, const Tensor& index) {
  const Tensor rows = empty({index.numel()}, int64, index.device());
  const kernels::IndexRows args{.index = index,
                                .outer = product(shape, 0, axis),
                                .size = shape[axis],
                                .length = index.shape()[axis],
                                .inner = product(shape, axis + 1, shape.size()),
                                .shared = false,
                                .rows = rows,
                                .op = op};
  if (index.numel() > 0) {
    on_device(index.device(), [&](auto device) { kernels::index_rows(device, args); });
  }
  return rows;
}

Tensor cut_to(const Tensor& x, const Shape& shape, int but) {
  Tensor result = x;
  for (int i = 0; i < x.dim(); ++i) {
    if (i != but && shape[i] < x.shape()[i]) {
      result = slice(result, i, 0, shape[i]);
    }
  }
  return result;
}

void check_scattered(const char* op, const Tensor& x, int axis, const Tensor& index, const Tensor& src) {
  check(src.dtype() == x.dtype(), "{}: expected src of {}, got {}", op, x.dtype(), src.dtype());
  check(src.device() == x.device(), "{}: expected src on {}, got {}", op, x.device(), src.device());
  const Shape& shape = index.shape();
  check(shape.size() == x.dim() && src.dim() == x.dim(),
        "{}: expected an index and src of {} axes, got shapes {} and {}", op, x.dim(), shape, src.shape());
  for (int i = 0; i < x.dim(); ++i) {
    check(shape[i] <= src.shape()[i] && (i == axis || shape[i] <= x.shape()[i]),
          "{}: expected an index no longer than src and x, got shapes {}, {} and {}", op, shape, src.shape(),
          x.shape());
  }
}

Tensor gather_for(const char* op, const Tensor& x, std::int64_t axis, const Tensor& index) {
  const int at = normalize_axis(axis, x.dim(), op);
  const Tensor positions = checked_index(op, x, index);
  const Shape& shape = index.shape();
  check(shape.size() == x.dim(), "{}: expected an index of {} axes, got shape {}", op, x.dim(), shape);
  for (int i = 0; i < x.dim(); ++i) {
    check(i == at || shape[i] <= x.shape()[i], "{}: expected an index of at most {} along axis {}, got shape {}", op,
          x.shape()[i], i, shape);
  }
  const Tensor part = cut_to(x, shape, at);
  const Tensor rows = rows_of_elements(op, part.shape(), at, positions);
  return autograd::apply(TakeRows{{.op = op, .table = part.shape(), .taken = shape, .width = 1}}, part, rows);
}

}  // namespace detail

Tensor gather(const Tensor& x, std::int64_t axis, const Tensor& index) {
  return detail::gather_for("gather", x, axis, index);
}

Tensor scatter_add(const Tensor& x, std::int64_t axis, const Tensor& index, const Tensor& src) {
  const int at = normalize_axis(axis, x.dim(), "scatter_add");
  const Tensor positions = detail::checked_index("scatter_add", x, index);
  check_source("scatter_add", x, src);
  detail::check_scattered("scatter_add", x, at, positions, src);
  const Shape& shape = index.shape();
  for (int i = 0; i < x.dim(); ++i) {
    if (i != at && shape[i] < x.shape()[i]) {  // the part of x that the index does not cover stays as it is
      const Tensor front = slice(x, i, 0, shape[i]);
      return cat({scatter_add(front, at, positions, src), slice(x, i, shape[i], x.shape()[i])}, i);
    }
  }
  const Tensor rows = detail::rows_of_elements("scatter_add", x.shape(), at, positions);
  return autograd::apply(AddRows{{.op = "scatter_add", .table = x.shape(), .taken = shape, .width = 1}}, x,
                         detail::cut_to(src, shape, -1), rows);
}

Tensor index_select(const Tensor& x, std::int64_t axis, const Tensor& index) {
  const int at = normalize_axis(axis, x.dim(), "index_select");
  const Tensor positions = checked_slices("index_select", x, index);
  Shape shape = x.shape();
  shape[at] = index.numel();
  const Tensor rows = rows_of_slices("index_select", x.shape(), at, positions);
  const std::int64_t width = product(x.shape(), at + 1, x.dim());
  return autograd::apply(TakeRows{{.op = "index_select", .table = x.shape(), .taken = shape, .width = width}}, x, rows);
}

Tensor index_add(const Tensor& x, std::int64_t axis, const Tensor& index, const Tensor& src) {
  const int at = normalize_axis(axis, x.dim(), "index_add");
  const Tensor positions = checked_slices("index_add", x, index);
  check_source("index_add", x, src);
  Shape shape = x.shape();
  shape[at] = index.numel();
  check(src.shape() == shape, "index_add: expected src of shape {}, got {}", shape, src.shape());
  const Tensor rows = rows_of_slices("index_add", x.shape(), at, positions);
  const std::int64_t width = product(x.shape(), at + 1, x.dim());
  return autograd::apply(AddRows{{.op = "index_add", .table = x.shape(), .taken = shape, .width = width}}, x, src,
                         rows);
}

namespace {

// The positions of the true elements of a row-major bool tensor. On CUDA, waits for the device.
Tensor true_positions(const char* op, const Tensor& mask) {
  if (mask.device().is_cuda()) {
    check_not_capturing(op);
  }
  return mask.numel() == 0 ? empty({0}, int64, mask.device())
                           : on_device(mask.device(), [&](auto device) { return kernels::positions_of(device, mask); });
}

}  // namespace

Tensor nonzero(const Tensor& x) {
  const Tensor positions = true_positions("nonzero", contiguous_data(ne(x, 0)));
  const Tensor indices = empty({positions.numel(), x.dim()}, int64, x.device());
  Tensor rest = positions;
  for (int axis = x.dim() - 1; axis >= 0; --axis) {
    const auto size = static_cast<double>(x.shape()[axis]);
    copy_into(select(indices, 1, axis), axis == 0 ? rest : fmod(rest, size));
    rest = floor_divide(rest, size);
  }
  return indices;
}

Tensor masked_select(const Tensor& x, const Tensor& mask) {
  check(mask.dtype() == boolean, "masked_select: expected a mask of bool, got {}", mask.dtype());
  check(mask.device() == x.device(), "masked_select: expected a mask on {}, got {}", x.device(), mask.device());
  const Shape shape = broadcast_shapes(x.shape(), mask.shape(), "masked_select");
  const Tensor all = expand(x, shape);
  const Tensor on = contiguous_data(broadcast_view(mask.detach(), shape));
  const Tensor positions = true_positions("masked_select", on);
  return autograd::apply(TakeRows{{.op = "masked_select", .table = shape, .taken = {positions.numel()}, .width = 1}},
                         all, positions);
}

}  // namespace mica

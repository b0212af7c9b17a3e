#include <mica/autograd/function.h>
#include <mica/core/capture.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
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

// Throws unless index has an integer dtype and x's device. Returns it as row-major int64.
Tensor checked_index(const char* op, const Tensor& x, const Tensor& index) {
  check(index.dtype() == int64 || index.dtype() == int32, "{}: expected an index of int64 or int32, got {}", op,
        index.dtype());
  check(index.device() == x.device(), "{}: expected an index on {}, got {}", op, x.device(), index.device());
  return contiguous_data(index.to(int64));
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

// The positions in the flattened tensor of shape `shape` to which the entries of an index refer, one per element.
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
  return checked_index(op, x, index);
}

// x, cut to the lengths in `shape` along all axes except `but`; -1: along all axes.
Tensor cut_to(const Tensor& x, const Shape& shape, int but) {
  Tensor result = x;
  for (int i = 0; i < x.dim(); ++i) {
    if (i != but && shape[i] < x.shape()[i]) {
      result = slice(result, i, 0, shape[i]);
    }
  }
  return result;
}

}  // namespace

namespace detail {

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
  const Tensor positions = checked_index("scatter_add", x, index);
  check_source("scatter_add", x, src);
  const Shape& shape = index.shape();
  check(shape.size() == x.dim() && src.dim() == x.dim(),
        "scatter_add: expected an index and src of {} axes, got shapes {} and {}", x.dim(), shape, src.shape());
  for (int i = 0; i < x.dim(); ++i) {
    check(shape[i] <= src.shape()[i] && (i == at || shape[i] <= x.shape()[i]),
          "scatter_add: expected an index no longer than src and x, got shapes {}, {} and {}", shape, src.shape(),
          x.shape());
  }
  for (int i = 0; i < x.dim(); ++i) {
    if (i != at && shape[i] < x.shape()[i]) {  // the part of x that the index does not cover stays as it is
      const Tensor front = slice(x, i, 0, shape[i]);
      return cat({scatter_add(front, at, positions, src), slice(x, i, shape[i], x.shape()[i])}, i);
    }
  }
  const Tensor rows = rows_of_elements("scatter_add", x.shape(), at, positions);
  return autograd::apply(AddRows{{.op = "scatter_add", .table = x.shape(), .taken = shape, .width = 1}}, x,
                         cut_to(src, shape, -1), rows);
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

Tensor masked_select(const Tensor& x, const Tensor& mask) {
  check(mask.dtype() == boolean, "masked_select: expected a mask of bool, got {}", mask.dtype());
  check(mask.device() == x.device(), "masked_select: expected a mask on {}, got {}", x.device(), mask.device());
  if (x.device().is_cuda()) {
    check_not_capturing("masked_select");
  }
  const Shape shape = broadcast_shapes(x.shape(), mask.shape(), "masked_select");
  const Tensor all = expand(x, shape);
  const Tensor on = contiguous_data(broadcast_view(mask.detach(), shape));
  const Tensor positions = on.numel() == 0
                               ? empty({0}, int64, x.device())
                               : on_device(x.device(), [&](auto device) { return kernels::positions_of(device, on); });
  return autograd::apply(TakeRows{{.op = "masked_select", .table = shape, .taken = {positions.numel()}, .width = 1}},
                         all, positions);
}

}  // namespace mica

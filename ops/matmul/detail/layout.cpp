#include <mica/core/copy.h>
#include <mica/ops/matmul/detail/layout.h>

namespace mica::kernels {

MatrixLayout matrix_layout(const Tensor& x) {
  const int row = x.dim() - 2;
  const int column = x.dim() - 1;
  const std::int64_t rows = x.shape()[row];
  const std::int64_t columns = x.shape()[column];
  // The stride of an axis of length 1 is irrelevant.
  const auto lies = [](std::int64_t lines, std::int64_t step, std::int64_t length, std::int64_t element_step) {
    return (length <= 1 || element_step == 1) && (lines <= 1 || step >= std::max<std::int64_t>(length, 1));
  };
  const auto leading = [](std::int64_t lines, std::int64_t step, std::int64_t length) {
    return lines <= 1 ? std::max<std::int64_t>(length, 1) : step;
  };
  const std::int64_t row_step = x.strides()[row];
  const std::int64_t column_step = x.strides()[column];
  if (lies(rows, row_step, columns, column_step)) {
    return {.readable = true, .transposed = false, .leading = leading(rows, row_step, columns)};
  }
  if (lies(columns, column_step, rows, row_step)) {
    return {.readable = true, .transposed = true, .leading = leading(columns, column_step, rows)};
  }
  return {};
}

Tensor readable(const Tensor& x) { return matrix_layout(x).readable ? x : contiguous_data(x); }

namespace {

// The leading axes alone, as a tensor whose elements are never read.
Tensor leading_axes(const Tensor& x) {
  const int axes = x.dim() - 2;
  return as_strided(x, x.shape().slice(0, axes), x.strides().slice(0, axes), x.handle()->offset);
}

StridedLoop<2> batch_loop(const Tensor& a, const Tensor& b, const Shape& out) {
  const Tensor leading_a = leading_axes(a);
  const Tensor leading_b = leading_axes(b);
  return {out.slice(0, out.size() - 2), {&leading_a, &leading_b}};
}

}  // namespace

MatmulBatch::MatmulBatch(const Tensor& a, const Tensor& b, const Shape& out) : loop_(batch_loop(a, b, out)) {}

}  // namespace mica::kernels

// Implements ops/linalg/detail/matrices.h.

#include <vector>

#include <mica/core/capture.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/ops/diagonal/diagonal.h>
#include <mica/ops/linalg/detail/matrices.h>
#include <mica/ops/view/view.h>

namespace mica::linalg {

void expect_matrices(const Tensor& a, const char* op, bool square) {
  check(a.dim() >= 2, "{}: expected a matrix or a batch of matrices, got shape {}", op, a.shape());
  check(a.dtype() == float64 || a.dtype() == float32, "{}: expected float64 or float32, got {}", op, a.dtype());
  check(!square || a.size(-1) == a.size(-2), "{}: expected square matrices, got shape {}", op, a.shape());
}

void expect_like(const Tensor& b, const Tensor& a, const char* op) {
  check(b.dtype() == a.dtype() && b.device() == a.device(),
        "{}: expected operands of one dtype and device, got {} on {} and {} on {}", op, a.dtype(), a.device(),
        b.dtype(), b.device());
}

Tensor transpose_of(const Tensor& x) { return transpose(x, -1, -2); }

Tensor identity(const Shape& batch, std::int64_t n, const Tensor& a) {
  Shape shape = batch;
  shape.push_back(n);
  shape.push_back(n);
  return expand(diag_embed(ones({n}, a.dtype(), a.device())), shape);
}

Shape batch_of(const Tensor& a, int axes) { return a.shape().slice(0, a.dim() - axes); }

void broadcast_batches(Tensor& a, Tensor& b, const char* op) {
  if (batch_of(a) == batch_of(b)) {
    return;
  }
  const Shape batch = broadcast_shapes(batch_of(a), batch_of(b), op);
  for (Tensor* x : {&a, &b}) {
    Shape shape = batch;
    shape.push_back(x->size(-2));
    shape.push_back(x->size(-1));
    *x = expand(*x, shape);
  }
}

Tensor empty_columns(std::int64_t batch, std::int64_t columns, std::int64_t rows, const Tensor& like) {
  return empty({batch, columns, rows}, like.dtype(), like.device());
}

Tensor columns_of(const Tensor& x) {
  const Tensor columns = empty_columns(numel_of(batch_of(x)), x.size(-1), x.size(-2), x);
  copy_into(matrices_of(columns, batch_of(x)), x.detach());
  return columns;
}

Tensor matrices_of(const Tensor& columns, const Shape& batch) {
  const std::int64_t n = columns.size(1);
  const std::int64_t m = columns.size(2);
  Shape shape = batch;
  shape.push_back(n);
  shape.push_back(m);
  Strides strides = contiguous_strides(shape);
  std::swap(strides[strides.size() - 2], strides.back());
  std::swap(shape[shape.size() - 2], shape.back());
  return as_strided(columns, shape, strides, columns.handle()->offset);
}

void check_info(const Tensor& info, const Shape& batch, const char* op, std::string (*f)(int number)) {
  const std::vector<std::int32_t> numbers = to_vector<std::int32_t>(info);
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    if (numbers[i] != 0) {
      Dims index = batch;
      auto rest = static_cast<std::int64_t>(i);
      for (int axis = batch.size(); axis-- > 0;) {
        index[axis] = rest % batch[axis];
        rest /= batch[axis];
      }
      const std::string which = batch.empty() ? "the matrix" : fmt::format("matrix {} of the batch", index);
      fail("{}: {} {}", op, which, f(numbers[i]));
    }
  }
}

void expect_not_capturing(const Tensor& a, const char* op) {
  if (a.device().is_cuda()) {
    check_not_capturing(op);
  }
}

}  // namespace mica::linalg

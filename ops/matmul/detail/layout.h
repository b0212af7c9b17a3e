#pragma once

#include <mica/core/detail/strided.h>
#include <mica/core/tensor.h>

namespace mica::kernels {

/// The memory layout of the matrix in a tensor's last two axes: contiguous rows or, if transposed, contiguous columns.
/// The distance between them is `leading` elements.
struct MatrixLayout {
  bool readable = false;  // false: a product needs a copy
  bool transposed = false;
  std::int64_t leading = 0;
};

MatrixLayout matrix_layout(const Tensor& x);

/// x itself if its matrices are readable, else a row-major copy without history.
Tensor readable(const Tensor& x);

/// The leading axes of a product, merged where memory allows: item i of the batch starts at element offset(0, i) of a
/// and offset(1, i) of b. The items of out are adjacent.
class MatmulBatch {
 public:
  MatmulBatch(const Tensor& a, const Tensor& b, const Shape& out);

  std::int64_t size() const { return loop_.numel; }
  std::int64_t offset(int operand, std::int64_t item) const {
    std::int64_t at = 0;
    for (int axis = loop_.rank - 1; axis >= 0; --axis) {
      at += item % loop_.sizes[axis] * loop_.strides[operand][axis];
      item /= loop_.sizes[axis];
    }
    return at;
  }

  /// Number of items, from a multiple of run() on, with a constant distance of run_stride(operand) elements.
  std::int64_t run() const { return loop_.inner_size(); }
  std::int64_t run_stride(int operand) const { return loop_.inner_stride(operand); }

 private:
  StridedLoop<2> loop_;
};

}  // namespace mica::kernels

#pragma once

// What the files of linear algebra share: checks of arguments, and storage by columns.

#include <optional>
#include <string>
#include <tuple>

#include <mica/autograd/autocast.h>
#include <mica/core/tensor.h>

namespace mica::linalg {

/// Throws unless a has matrices (square, if asked for) of float64 or float32.
void expect_matrices(const Tensor& a, const char* op, bool square);
/// Throws unless b has a's dtype and device.
void expect_like(const Tensor& b, const Tensor& a, const char* op);

/// xᵀ of each matrix; recorded.
Tensor transpose_of(const Tensor& x);
/// Identity matrices (…, n, n) of a's dtype and device.
Tensor identity(const Shape& batch, std::int64_t n, const Tensor& a);
/// a's shape without its last `axes` axes.
Shape batch_of(const Tensor& a, int axes = 2);
/// Broadcasts the leading axes of both; recorded.
void broadcast_batches(Tensor& a, Tensor& b, const char* op);

/// A new tensor (batch, columns, rows) with the matrices of x by columns, for kernels that write in place. No history.
Tensor columns_of(const Tensor& x);
/// New memory for matrices (…, rows, columns) by columns.
Tensor empty_columns(std::int64_t batch, std::int64_t columns, std::int64_t rows, const Tensor& like);
/// A view (batch…, rows, columns) of columns (n, columns, rows). No history.
Tensor matrices_of(const Tensor& columns, const Shape& batch);

/// Throws if info, of matrices with these leading axes, has a number other than 0: f(number) completes the sentence
/// that begins with "op: the matrix", or "op: matrix [2, 0] of the batch".
void check_info(const Tensor& info, const Shape& batch, const char* op, std::string (*f)(int number));
/// Throws while a CUDA graph of a's device is captured.
void expect_not_capturing(const Tensor& a, const char* op);

/// Under autocast, calls f with its operands in float32 and autocast off: linear algebra needs the precision.
template <class F, class... T>
auto in_full_precision(F f, const T&... operands) {
  if (!autograd::autocast_active()) {
    return f(operands...);
  }
  const std::tuple wide{autograd::widened(operands)...};
  const autograd::Autocast off(std::nullopt);
  return std::apply(f, wide);
}

}  // namespace mica::linalg

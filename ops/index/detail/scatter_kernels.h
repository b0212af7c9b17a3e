#pragma once

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>

namespace mica::kernels {

/// How elements that go to one place are combined; `last` keeps the one with the largest position.
enum class Combination { product, largest, smallest, last };

/// y[rows[i]] = y[rows[i]] combined with src[i], for all i in increasing order. Rows out of range are skipped. NaN wins
/// over numbers. Floats are multiplied in double and rounded once.
struct Scatter {
  Combination combination;
  const Tensor& src;   // (n), row-major
  const Tensor& rows;  // (n) int64, row-major
  const Tensor& y;     // of src's dtype, row-major
};

/// Of any dtype for `last`, else of a numeric one.
void scatter(Cpu, const Scatter& args);
void scatter(Cuda, const Scatter& args);

}  // namespace mica::kernels

#pragma once

// What all reductions share.

#include <cstdint>

#include <mica/core/tensor.h>

namespace mica::reduction {

/// The shape of a reduction's result with all reduced axes kept at length 1, and the shape that the caller gets.
struct Shapes {
  Shape kept;
  Shape result;
  std::int64_t count = 1;  // elements per result
};

/// Throws an error that starts with `op` for an axis that does not exist or occurs twice.
Shapes reduced_shapes(const Tensor& x, const Dims& axes, bool keepdim, const char* op);

/// A contiguous tensor viewed in another shape with the same number of elements; no history.
Tensor viewed_as(const Tensor& x, const Shape& shape);

/// Recorded sum and mean over the reduced axes, from x's shape to the result's.
Tensor sum_over(const Tensor& x, const Shapes& shapes);
Tensor mean_over(const Tensor& x, const Shapes& shapes);

}  // namespace mica::reduction

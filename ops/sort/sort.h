#pragma once

#include <mica/core/tensor.h>

namespace mica {

// Sorting along an axis, for any dtype. NaN is larger than all numbers, and −0 equals 0. The sort is stable, so that
// both devices give the same result. Values are gathered by the indices (ops/index) and are differentiable any number
// of times; indices are int64 and not differentiable. On CUDA, tensors of 2³¹ elements or more throw.

struct SortResult {
  Tensor values;
  Tensor indices;  ///< int64: each value's position in x along the axis
};

/// Sorts from the smallest element to the largest or, if `descending`, from the largest to the smallest.
SortResult sort(const Tensor& x, std::int64_t axis = -1, bool descending = false);

/// The indices of sort().
Tensor argsort(const Tensor& x, std::int64_t axis = -1, bool descending = false);

/// The k largest elements along an axis in descending order or, if `largest` is false, the k smallest in ascending
/// order. Of equal elements, the first come first. Throws unless k is from 0 to the length of the axis.
SortResult topk(const Tensor& x, std::int64_t k, std::int64_t axis = -1, bool largest = true);

}  // namespace mica

#pragma once

#include <mica/core/tensor.h>

namespace mica {

// Orders along an axis. Any dtype. NaN is larger than all numbers, and −0 equals 0. Equal elements keep their order, so
// that both devices give the same result. The values are gathered by the indices (ops/index), through which they are
// differentiable any number of times; indices are int64 and not differentiable. On CUDA for fewer than 2³¹ elements.

struct SortResult {
  Tensor values;
  Tensor indices;  ///< of the values in x, along the axis
};

/// The elements from the smallest to the largest or, if `descending`, from the largest to the smallest.
SortResult sort(const Tensor& x, std::int64_t axis = -1, bool descending = false);

/// The indices of sort().
Tensor argsort(const Tensor& x, std::int64_t axis = -1, bool descending = false);

/// The k largest elements, or the k smallest, in the order of sort(): for equal elements the first ones. Throws unless
/// k is from 0 to the length of the axis.
SortResult topk(const Tensor& x, std::int64_t k, std::int64_t axis = -1, bool largest = true);

}  // namespace mica

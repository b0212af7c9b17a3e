#pragma once

#include <mica/core/tensor.h>

namespace mica {

// Searching sorted tensors and finding distinct elements. NaN is larger than all numbers, as in sort(). Not
// differentiable.

/// Where to insert `values` into the ascending `sorted`, so that it remains sorted: before equal elements or, if
/// `right`, after them. `sorted` has one axis, and the values any shape; or (…, n) and values (…, m) with the same
/// leading axes, of which each row is searched on its own. Both have the same numeric dtype and device. Returns int64
/// of the values' shape, from 0 to n. That `sorted` is sorted is not checked.
Tensor searchsorted(const Tensor& sorted, const Tensor& values, bool right = false);

/// The index of the bucket of each element of x, int64 of x's shape: bucket i is from boundaries[i − 1], exclusive, to
/// boundaries[i], inclusive; if `right`, from boundaries[i − 1], inclusive, to boundaries[i], exclusive. The boundaries
/// are ascending, of one axis and x's dtype.
Tensor bucketize(const Tensor& x, const Tensor& boundaries, bool right = false);

struct UniqueResult {
  Tensor values;   ///< (k), of x's dtype
  Tensor inverse;  ///< int64 of x's shape: the position of each element of x in `values`
  Tensor counts;   ///< (k) int64: how often each value occurs in x
};

/// The distinct elements of x in ascending order, for any dtype. Every NaN is distinct. On CUDA, waits for the device.
UniqueResult unique(const Tensor& x);

}  // namespace mica

#pragma once

// What other ops use of index.

#include <mica/core/tensor.h>

namespace mica::detail {

/// gather(), with errors that begin with `op` instead of "gather".
Tensor gather_for(const char* op, const Tensor& x, std::int64_t axis, const Tensor& index);

/// Throws unless index has an integer dtype and x's device. Returns it as row-major int64.
Tensor checked_index(const char* op, const Tensor& x, const Tensor& index);

/// Throws unless the index and src suit x, as for scatter_add().
void check_scattered(const char* op, const Tensor& x, int axis, const Tensor& index, const Tensor& src);

/// The positions in the flattened tensor of shape `shape` to which the entries of an index refer, one per element: see
/// kernels::IndexRows.
Tensor rows_of_elements(const char* op, const Shape& shape, int axis, const Tensor& index);

/// x, cut to the lengths in `shape` along all axes except `but`; -1: along all axes.
Tensor cut_to(const Tensor& x, const Shape& shape, int but);

}  // namespace mica::detail

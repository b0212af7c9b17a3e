#pragma once

#include <mica/core/tensor.h>

namespace mica {

// Writing and combining elements by index, as in index.h: with the same rules for the index, and for indices out of
// range. All are differentiable any number of times in x and src, unless stated otherwise. On CUDA, they sort the
// index, so that the results are the same in every run.
//
// The formulas below are for three axes and axis = 1.

/// y = x, then y[i, index[i, j, k], k] = src[i, j, k], of any dtype. If an index occurs several times, the last element
/// in row-major order is kept, and only that one gets a gradient. A number stands for a src that has it everywhere.
Tensor scatter(const Tensor& x, std::int64_t axis, const Tensor& index, const Tensor& src);
Tensor scatter(const Tensor& x, std::int64_t axis, const Tensor& index, double value);

/// amax and amin are NaN if any element is.
enum class ScatterReduction { sum, prod, mean, amax, amin };

/// y[i, m, k] = the sum, product, mean, largest or smallest of x[i, m, k] and all src[i, j, k] with index[i, j, k] = m.
/// Without `include_self`, x is used only where there is no such j. For all numeric dtypes; sum and mean not for uint8.
/// Sums and products are rounded once; the mean of integers is rounded down.
///
/// The gradient of amax and amin is shared evenly among the elements equal to the result. Second derivatives of a
/// product that has factors of 0 are not complete: those between a factor of 0 and the others are missing.
Tensor scatter_reduce(const Tensor& x, std::int64_t axis, const Tensor& index, const Tensor& src,
                      ScatterReduction reduction, bool include_self = true);

/// scatter_reduce() for whole slices: the index has one axis, and src has x's shape, except along `axis`, where it has
/// the index's length.
Tensor index_reduce(const Tensor& x, std::int64_t axis, const Tensor& index, const Tensor& src,
                    ScatterReduction reduction, bool include_self = true);

}  // namespace mica

#pragma once

#include <array>
#include <optional>
#include <vector>

#include <mica/core/tensor.h>
#include <mica/ops/reduce/reduce.h>

namespace mica {

/// The median of all elements, of a numeric dtype: of an even number of elements, the smaller one of the two in the
/// middle. NaN if any element is NaN. The gradient is shared evenly among all elements equal to it. Throws for a tensor
/// without elements.
Tensor median(const Tensor& x);

/// The median along an axis, and its index; of several equal elements, the first in a stable sort that is in the
/// middle. If there are NaNs, the first NaN. The gradient goes to that element only. Throws for an axis without
/// elements.
MaxResult median(const Tensor& x, std::int64_t axis, bool keepdim = false);

/// What a quantile is if it lies between two elements: a number between them in proportion, the lower one, the higher
/// one, their mean, or the nearest one (ties: the one with the even rank).
enum class Interpolation { linear, lower, higher, midpoint, nearest };

/// The q-th quantile of all elements or along an axis, for floating x: with the elements x[0] ≤ … ≤ x[n − 1], the
/// element of rank q · (n − 1). NaN if any element is NaN. 16-bit floats are interpolated in float32. Differentiable in
/// x. Throws unless 0 ≤ q ≤ 1, and if there are no elements. Several quantiles are stacked along a new first axis.
Tensor quantile(const Tensor& x, double q, std::optional<std::int64_t> axis = {}, bool keepdim = false,
                Interpolation interpolation = Interpolation::linear);
Tensor quantile(const Tensor& x, const std::vector<double>& qs, std::optional<std::int64_t> axis = {},
                bool keepdim = false, Interpolation interpolation = Interpolation::linear);

struct VarMeanResult {
  Tensor var;
  Tensor mean;
};
struct StddevMeanResult {
  Tensor stddev;
  Tensor mean;
};

/// var() or stddev(), and mean(), over the same axes.
VarMeanResult var_mean(const Tensor& x, const Dims& axes = {}, double correction = 1, bool keepdim = false);
StddevMeanResult stddev_mean(const Tensor& x, const Dims& axes = {}, double correction = 1, bool keepdim = false);

/// How often each number from 0 on occurs in x, which has one axis and an integer dtype: y[v] = the number of i with
/// x[i] = v, int64; or, with weights of x's shape and a floating dtype, y[v] = Σ weights[i], of the weights' dtype,
/// which is differentiable in the weights. The result's length is max(x) + 1, or `minlength` if that is larger. Throws
/// if an element is negative. On CUDA, waits for the device.
Tensor bincount(const Tensor& x, const Tensor& weights = {}, std::int64_t minlength = 0);

struct HistogramOptions {
  /// The range of the bins; by default, from the smallest to the largest element (which on CUDA waits for the device),
  /// or from 0 to 1 if there are none. If both ends are equal, it is widened by ½ on each side.
  std::optional<std::array<double, 2>> range{};
  Tensor weight{};       ///< of each element, of x's shape and dtype; undefined: 1
  bool density = false;  ///< whether to divide the counts by their sum and the widths of the bins
};
struct HistogramResult {
  Tensor counts;  ///< (bins)
  Tensor edges;   ///< (bins + 1)
};

/// How many elements of x, of any shape, are in each of `bins` bins of equal width, or in the bins between ascending
/// edges of x's dtype. A bin includes its left edge, the last one also its right edge; elements outside, and NaN, are
/// not counted. For floating x; counts and edges have x's dtype, or float32 for 16-bit floats. Not differentiable.
/// Throws if there are no bins, or if the range is not finite and ascending.
HistogramResult histogram(const Tensor& x, std::int64_t bins, const HistogramOptions& options = {});
HistogramResult histogram(const Tensor& x, const Tensor& edges, const HistogramOptions& options = {});

}  // namespace mica

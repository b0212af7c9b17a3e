#pragma once

#include <cstdint>

#include <mica/core/tensor.h>

namespace mica {

/// Group normalization: the channels of each sample are divided into groups of neighbors, and each group is shifted and
/// scaled to mean 0 and variance 1; then each channel is weighted.
///
///   y = (x − mean) / √(var + eps) · weight + bias
///
/// @param x             (N, C, …), floating. mean and var = mean((x − mean)²) are over a group's C / groups channels
///                      and all axes after them.
/// @param groups        divides C.
/// @param weight, bias  (C), each optional (undefined: 1 and 0), of x's dtype or, for 16-bit x, float32.
/// @param eps           added to the variance, under the root; at least 0.
/// @return y, of x's shape, dtype and layout. Differentiable in x, weight and bias any number of times.
///
/// A group is a row of layer_norm(), which documents precision. Throws Error before anything is computed if a shape,
/// dtype or device does not match.
///
/// Wu, He: Group Normalization (2018), arXiv:1803.08494.
Tensor group_norm(const Tensor& x, std::int64_t groups, const Tensor& weight = {}, const Tensor& bias = {},
                  double eps = 1e-5);

/// Instance normalization: group_norm() with a group for each channel. Throws if a channel of a sample has one element.
Tensor instance_norm(const Tensor& x, const Tensor& weight = {}, const Tensor& bias = {}, double eps = 1e-5);

}  // namespace mica

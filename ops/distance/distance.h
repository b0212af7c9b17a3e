#pragma once

#include <mica/core/tensor.h>

namespace mica {

// Norms and distances of vectors, for floating dtypes. Two tensors have the same dtype and device. 16-bit floats are
// computed in float32. Differentiable any number of times; where a norm is 0, its derivative is 0. Norms are those of
// vector_norm().

/// x / max(‖x‖ₚ, eps) along an axis.
Tensor normalize(const Tensor& x, double p = 2, std::int64_t axis = 1, double eps = 1e-12);

/// The cosine of the angle between x and y along an axis: x · y / (max(‖x‖, eps) · max(‖y‖, eps)). The shapes
/// broadcast.
Tensor cosine_similarity(const Tensor& x, const Tensor& y, std::int64_t axis = 1, double eps = 1e-8);

/// ‖x − y + eps‖ₚ along the last axis. The shapes broadcast.
Tensor pairwise_distance(const Tensor& x, const Tensor& y, double p = 2, double eps = 1e-6, bool keepdim = false);

/// The distances ‖xᵢ − yⱼ‖ₚ between all rows of x (…, M, K) and of y (…, R, K): (…, M, R). Leading axes broadcast. For
/// p = 2 and more than 25 rows, they are computed from a matrix product, after a common vector has been subtracted from
/// all rows: the error then is relative to the rows' norms, not to the distance. Throws if p < 0.
Tensor cdist(const Tensor& x, const Tensor& y, double p = 2);

}  // namespace mica

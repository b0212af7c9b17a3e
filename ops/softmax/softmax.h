#pragma once

#include <mica/core/tensor.h>

namespace mica {

/// exp(x) / Σ exp(x) along an axis, for floating x of any shape; of x's shape and dtype. It does not overflow, since
/// the maximum is subtracted first. Elements of −inf give 0; if all along the axis are −inf, they give NaN. 16-bit
/// floats are computed in float32 and rounded once. Differentiable any number of times.
Tensor softmax(const Tensor& x, std::int64_t axis);

/// log softmax(x) = x − log Σ exp(x) along an axis. Unlike log(softmax(x)), it is accurate for very small
/// probabilities, too. Otherwise as softmax().
Tensor log_softmax(const Tensor& x, std::int64_t axis);

}  // namespace mica

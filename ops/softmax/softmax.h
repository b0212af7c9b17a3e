#pragma once

#include <mica/core/tensor.h>

namespace mica {

/// exp(x) / Σ exp(x) along an axis, for floating x of any shape, without overflow: the largest x is taken off first.
/// Elements of -inf get 0; where all of them are -inf, the result is NaN.
Tensor softmax(const Tensor& x, std::int64_t axis);

/// log softmax(x) = x - log Σ exp(x) along an axis, as exact for very unlikely elements as for likely ones.
Tensor log_softmax(const Tensor& x, std::int64_t axis);

}  // namespace mica

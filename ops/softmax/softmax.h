#pragma once

#include <mica/core/tensor.h>

namespace mica {

/// exp(x) / Σ exp(x) along an axis, for floating x of any shape, without overflow: the maximum is subtracted first.
/// Elements of -inf give 0; if all of them are -inf, the result is NaN.
Tensor softmax(const Tensor& x, std::int64_t axis);

/// log softmax(x) = x - log Σ exp(x) along an axis, with full accuracy also for very unlikely elements.
Tensor log_softmax(const Tensor& x, std::int64_t axis);

}  // namespace mica

#pragma once

#include <mica/core/tensor.h>

namespace mica {

/// x with zeros above (tril) or below (triu) a diagonal of its last two axes (rows, columns). Diagonal 0 is the main
/// one, positive ones are above it, negative ones below. Any dtype. Differentiable. Throws if x has fewer than two
/// axes.
Tensor tril(const Tensor& x, std::int64_t diagonal = 0);
Tensor triu(const Tensor& x, std::int64_t diagonal = 0);

}  // namespace mica

#pragma once

#include <mica/core/tensor.h>

namespace mica {

/// The last two axes (rows, columns) with zeros above (tril) or below (triu) the diagonal `diagonal`, counted upward
/// from the main one. Any dtype; at least two axes. Differentiable.
Tensor tril(const Tensor& x, std::int64_t diagonal = 0);
Tensor triu(const Tensor& x, std::int64_t diagonal = 0);

}  // namespace mica

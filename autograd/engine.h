#pragma once

#include <mica/core/tensor.h>

namespace mica::autograd {

/// Backpropagates `gradient` from `root` through the recorded graph and accumulates into each leaf's grad. Throws if
/// `root` has no graph, if `gradient` does not match it, or if saved tensors of a node were already freed.
void backward(const Tensor& root, const Tensor& gradient, BackwardOptions options);

}  // namespace mica::autograd

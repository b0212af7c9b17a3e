#pragma once

#include <mica/core/tensor.h>

namespace mica::autograd {

/// Sends `gradient` back from `root` through the recorded graph and adds what arrives to each leaf's grad.
/// Throws if `root` has no graph, if `gradient` does not fit it, or if a node's saved tensors are already gone.
void backward(const Tensor& root, const Tensor& gradient, BackwardOptions options);

}  // namespace mica::autograd

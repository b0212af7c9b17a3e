#pragma once

#include <cstddef>

#include <mica/autograd/node.h>
#include <mica/core/tensor.h>

namespace mica::autograd {

/// Where a tensor's gradient goes: to the op that produced it, to a leaf's accumulator, or nowhere.
Edge gradient_edge(const Tensor& x);

/// Whether `x` is row-major or channels last, has no history, and is the only reference to its memory.
bool is_unshared(const Tensor& x);

/// For the backward of a Function. Returns the gradient that input `i` has received from its other uses so far; for a
/// leaf on a GPU, this may be its `grad` from earlier backward passes. Add to it in place and return it as the gradient
/// of that input: this saves a pass that adds two tensors.
///
/// Undefined if there is none yet, if its memory is shared, or if recording or hooks need each contribution separately.
/// In that case, return the gradient as usual.
Tensor take_pending_gradient(std::size_t i);

/// Returns `gradient` if is_unshared(), else a copy.
Tensor unshared(Tensor gradient);

}  // namespace mica::autograd

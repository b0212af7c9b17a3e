#pragma once

#include <cstddef>

#include <mica/core/tensor.h>

namespace mica::autograd {

/// Whether `x` is row-major, has no history, and is the only reference to its memory.
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

/// Returns sum + gradient, recorded if recording is on. Otherwise adds into the memory of `sum` if it is unshared, or
/// if `in_place` allows every owner of that memory to see the sum.
Tensor add_gradients(Tensor sum, const Tensor& gradient, bool in_place = false);

}  // namespace mica::autograd

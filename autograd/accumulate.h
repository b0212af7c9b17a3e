#pragma once

#include <cstddef>

#include <mica/core/tensor.h>

namespace mica::autograd {

/// Whether `x` is row-major, has no history, and no one else refers to its memory.
bool is_unshared(const Tensor& x);

/// Call in the backward of a Function. Returns the gradient of input `i` from its other uses so far; for a leaf on a
/// GPU also its `grad` from earlier backward passes. Add to it in place and return it as the gradient of that input:
/// this saves a pass that adds two tensors.
///
/// Undefined if there is none yet, if others share its memory, or if recording or hooks need each contribution by
/// itself. Then return the gradient as usual.
Tensor take_gradient_so_far(std::size_t i);

/// Returns `gradient` if no one else refers to its memory and it is row-major and has no history; else a copy that is.
Tensor unshared(Tensor gradient);

/// Returns sum + gradient, recorded if recording is on. Otherwise adds into the memory of `sum` where no one else
/// refers to it, or where `in_place` allows every owner of that memory to see the sum.
Tensor add_gradients(Tensor sum, const Tensor& gradient, bool in_place = false);

}  // namespace mica::autograd

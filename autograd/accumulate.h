#pragma once

#include <cstddef>

#include <mica/core/tensor.h>

namespace mica::autograd {

/// Whether `x` is row-major, has no history, and no one else refers to its memory.
bool is_unshared(const Tensor& x);

/// In the backward of a Function: takes over what other uses of input `i` have contributed to its gradient so far; on a
/// GPU, for a leaf, also `grad` with what earlier backward passes have left there. Who takes it adds to it in place and
/// returns it as the gradient of that input, which saves a pass that adds two tensors. Undefined, for which the
/// gradient is returned as always, if there is none yet, if it is not in memory of its own, or if recording or hooks
/// need each contribution by itself.
Tensor take_gradient_so_far(std::size_t i);

/// Returns `gradient` if no one else refers to its memory and it is row-major and has no history; else a copy that is.
Tensor unshared(Tensor gradient);

/// Returns sum + gradient, recorded if recording is on. Otherwise adds into the memory of `sum` where no one else
/// refers to it, or where `in_place` allows every owner of that memory to see the sum.
Tensor add_gradients(Tensor sum, const Tensor& gradient, bool in_place = false);

}  // namespace mica::autograd

#pragma once

#include <mica/core/tensor.h>

namespace mica::autograd {

/// Returns `gradient` if no one else refers to its memory and it is row-major and has no history; else a copy that is.
Tensor unshared(Tensor gradient);

/// Returns sum + gradient, recorded if recording is on. Otherwise adds into the memory of `sum` where no one else
/// refers to it, or where `in_place` allows every owner of that memory to see the sum.
Tensor add_gradients(Tensor sum, const Tensor& gradient, bool in_place = false);

}  // namespace mica::autograd

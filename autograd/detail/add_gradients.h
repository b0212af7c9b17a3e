#pragma once

#include <mica/core/tensor.h>

namespace mica::autograd {

/// Returns sum + gradient, recorded if recording is on. Otherwise adds into the memory of `sum` if it is unshared, or
/// if `in_place` allows every owner of that memory to see the sum.
Tensor add_gradients(Tensor sum, const Tensor& gradient, bool in_place);

}  // namespace mica::autograd

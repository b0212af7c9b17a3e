#pragma once

#include <mica/core/tensor.h>

namespace mica::autograd {

/// `gradient` itself if its memory is nobody else's, row-major and without history; else such a copy.
Tensor unshared(Tensor gradient);

/// sum + gradient, recorded if anything is. Else the memory of `sum` is reused where nobody else can see it, or where
/// `in_place` says that all who see it shall see the sum.
Tensor add_gradients(Tensor sum, const Tensor& gradient, bool in_place = false);

}  // namespace mica::autograd

#pragma once

#include <mica/core/tensor.h>

// Autograd of in-place writes. A recorded op that writes `x` becomes the op that produced x: x gets a new slot. If x is
// a view, its base has changed too. The new history of the base is "the old base, overwritten by x", and every view of
// it, x included, is re-derived from the base at its next use.

namespace mica::autograd {

/// Throws an error that names `op` if `x` must not be written in place: outside inference mode, a tensor created in it;
/// while recording, a leaf that requires a gradient, a view of one, or a view returned by a custom op.
void check_writable(const char* op, const Tensor& x);

/// After an in-place write to `x`: gives x the history of `written`, another handle to the same elements, if it has
/// one.
void adopt_history(const Tensor& x, const Tensor& written);

/// Registers `view` as a view of `x`, so that in-place writes to one change the history of the other. Views made while
/// recording is off are not registered: for autograd they are independent tensors, like the result of detach().
void link_view(const Tensor& view, const Tensor& x);

/// The same for a view returned by a custom op or a checkpoint. Writing either in place and then using the other is an
/// error, since only the op knows how they are related.
void link_custom_view(const Tensor& view, const Tensor& x);

}  // namespace mica::autograd

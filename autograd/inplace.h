#pragma once

#include <mica/core/tensor.h>

// How the graph follows writes in place. An op that writes `x` and is recorded becomes the op that made x: x gets a new
// slot. If x is a view, the tensor it is a view of was changed too, so that one's new history is "its old elements,
// with those of x laid over them", and its views, x among them, are read from it anew when they are next used.

namespace mica::autograd {

/// Throws, naming `op`, if `x` may not be written in place now: outside of inference mode, a tensor that was made in
/// it; while recording, a leaf that requires a gradient, a view of one, or a view that a custom op returned.
void check_writable(const char* op, const Tensor& x);

/// After a write in place to `x`: gives x the history of `written`, another handle to the same elements, if it has one.
void adopt_history(const Tensor& x, const Tensor& written);

/// Says that `view` shows elements of `x`, which explains it fully: reading and writing one is reading and writing the
/// other. Views made while recording is off are not linked: to autograd they are tensors of their own, as detach()
/// makes.
void link_view(const Tensor& view, const Tensor& x);

/// The same of a view that an op of the user's returned, or a checkpoint: to write either of the two in place and use
/// the other is an error, as only that op knows what it would change.
void link_custom_view(const Tensor& view, const Tensor& x);

/// Gives a view of a tensor that was written in place its new history. Throws if it cannot have one.
void update_view(const Tensor& x);

}  // namespace mica::autograd

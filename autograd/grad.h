#pragma once

#include <mica/core/tensor.h>

namespace mica::autograd {

struct GradOptions {
  bool retain_graph = false;  ///< keep saved tensors, so that backward can run again
  bool create_graph =
      false;  ///< record the backward pass, so that the gradients can be differentiated; retains the graph
  bool allow_unused =
      false;  ///< return an undefined gradient for an input that the outputs do not depend on, instead of throwing
};

/// The gradients of Σ outputs[i] · gradients[i] with respect to `inputs`, which may be leaves or results of ops: one
/// per input, with its shape and dtype. No leaf's grad changes, and only the ops between inputs and outputs run
/// backward. `gradients` has one tensor per output, or is empty; an undefined tensor, or an empty list, means 1 for an
/// output of one element. Hooks of the tensors in between see and replace gradients as in backward().
///
/// With create_graph, the gradients can be differentiated through every op whose backward consists of recorded ops (see
/// Function). Differentiating through another op throws an error that names it.
///
/// Throws if an output has no graph, if a gradient does not match its output, if an input does not require a gradient
/// or, unless allow_unused, if the outputs do not depend on it.
Tensors grad(const Tensors& outputs, const Tensors& inputs, const Tensors& gradients = {}, GradOptions options = {});

}  // namespace mica::autograd

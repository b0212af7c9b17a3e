#pragma once

#include <mica/core/tensor.h>

namespace mica::autograd {

struct GradOptions {
  bool retain_graph = false;  ///< keep saved tensors, so that backward can run again
  bool create_graph = false;  ///< record what computes the gradients, so that they have gradients; retains the graph
  bool allow_unused = false;  ///< an input that the outputs do not depend on gets an undefined gradient, not an error
};

/// The gradients of Σ outputs[i] · gradients[i] with respect to `inputs`, leaves or results of ops alike, in order and
/// of their shapes and dtypes. Nothing is added to any leaf's grad, and only the ops between inputs and outputs are run
/// backward. `gradients`: one for each output, undefined or left out altogether for outputs of one element (then 1).
/// Hooks of the tensors on the way see and replace gradients as in backward().
///
/// With create_graph, gradients of gradients go through every op whose backward is made of recorded ops (see Function).
/// Through others they raise, once somebody asks for them, an error that names the op.
///
/// Throws if an output has no graph, a gradient does not fit its output, an input does not require a gradient or,
/// unless allow_unused, the outputs do not depend on it.
Tensors grad(const Tensors& outputs, const Tensors& inputs, const Tensors& gradients = {}, GradOptions options = {});

}  // namespace mica::autograd

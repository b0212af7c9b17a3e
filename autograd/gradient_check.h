#pragma once

#include <mica/autograd/node.h>

namespace mica::autograd {

/// What DetectAnomaly does during one backward pass: called at each step of a node, throws at the first gradient that
/// is not finite. Where DetectAnomaly is off, nothing is done.
class GradientCheck {
 public:
  GradientCheck();

  /// A gradient to start from.
  void given(const Tensor& gradient) const;
  /// Those of a node's outputs, summed up, before its hooks see them.
  void arrived(const Node& node, const Tensors& gradients);
  /// After the hooks.
  void hooked(const Node& node, const Tensors& gradients);
  /// Those that the node's backward returned for its inputs.
  void made(Node& node, const Tensors& results) const;

 private:
  bool on_;
  Tensors before_hooks_;
};

}  // namespace mica::autograd

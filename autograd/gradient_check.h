#pragma once

#include <functional>
#include <string>

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
  /// After the hooks of its outputs, and after those before backward.
  void hooked(const Node& node, const Tensors& gradients);
  void prehooked(const Node& node, const Tensors& gradients);
  /// Those that the node's backward returned for its inputs.
  void made(Node& node, const Tensors& results);
  /// After the hooks that follow.
  void posthooked(const Node& node, const Tensors& results);

 private:
  void check_replaced(const Node& node, const Tensors& gradients, const std::function<std::string(std::size_t)>& what);

  bool on_;
  Tensors before_hooks_;
};

}  // namespace mica::autograd

#pragma once

#include <functional>
#include <string>

#include <mica/autograd/node.h>

namespace mica::autograd {

/// DetectAnomaly's checks during one backward pass. Called at each step of a node; throws at the first gradient that is
/// not finite. Does nothing while DetectAnomaly is off.
class GradientCheck {
 public:
  GradientCheck();

  /// A gradient passed to backward() or grad().
  void given(const Tensor& gradient) const;
  /// The accumulated gradients of a node's outputs, before its hooks.
  void arrived(const Node& node, const Tensors& gradients);
  /// After the output hooks, and after the pre-hooks.
  void hooked(const Node& node, const Tensors& gradients);
  void prehooked(const Node& node, const Tensors& gradients);
  /// The input gradients that the node's backward returned.
  void made(Node& node, const Tensors& results);
  /// After the post-hooks.
  void posthooked(const Node& node, const Tensors& results);

 private:
  void check_replaced(const Node& node, const Tensors& gradients, const std::function<std::string(std::size_t)>& what);

  bool on_;
  Tensors before_hooks_;
};

}  // namespace mica::autograd

#pragma once

#include <vector>

#include <mica/autograd/node.h>
#include <mica/core/tensor.h>

namespace mica::autograd {

/// Backpropagates `gradient` from `root` through the recorded graph and accumulates into each leaf's grad. Throws if
/// `root` has no graph, if `gradient` does not match it, or if saved tensors of a node were already freed.
void backward(const Tensor& root, const Tensor& gradient, BackwardOptions options);

/// Where a traversal starts.
struct Root {
  Edge edge;
  Tensor gradient;
};

/// The root for `output` and its `gradient`; an undefined gradient means 1, for an output of one element. Throws an
/// error that starts with `op` if `output` has no graph or `gradient` does not match it.
Root root_of(const char* op, const Tensor& output, const Tensor& gradient);

struct TraverseOptions {
  bool retain_graph = false;    ///< keep saved tensors
  bool record = false;          ///< record the ops of the backward pass
  bool adds_to_leaves = false;  ///< ops may add directly to the `grad` of a leaf, instead of its accumulator
  bool early_leaves = false;    ///< accumulate into leaves in an EarlyAccumulation when their gradients are complete
};

/// Callbacks of a traversal.
class Visitor {
 public:
  virtual ~Visitor() = default;
  /// Receives each node with its complete output gradients; returns whether to continue through it.
  virtual bool enters(const Node& /*node*/, const Tensors& /*gradients*/) { return true; }
  /// Called after a checkpoint has added nodes to the graph.
  virtual void replayed() {}
};

/// Backpropagates through the graph, newest node first.
void traverse(const std::vector<Root>& roots, TraverseOptions options, Visitor& visitor);

}  // namespace mica::autograd

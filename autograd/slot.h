#pragma once

#include <memory>
#include <vector>

#include <mica/autograd/node.h>
#include <mica/autograd/trace.h>
#include <mica/core/tensor.h>

namespace mica::autograd {

/// What autograd remembers of one tensor.
struct Slot {
  bool requires_grad = false;       // a leaf that asks for a gradient
  Tensor grad;                      // … and what it has so far
  std::vector<Hook> hooks;          // … and who wants to see it first
  std::weak_ptr<Node> accumulator;  // … and the node that adds to it, while a graph uses it
  std::shared_ptr<Node> node;       // the op that made this tensor; null for a leaf
  int output = 0;                   // … as which of its outputs
  std::unique_ptr<Notes> notes;     // what to call it in messages; null for most
};

/// Where a tensor's gradient goes: to the op that made it, to a leaf's accumulator, or nowhere.
Edge gradient_edge(const Tensor& x);

/// The slot of `x`, made if it has none.
Slot& slot_of(const Tensor& x);

/// The elements of `x` without history, for autograd's own use: detach() is the user's, who may want it explained.
Tensor without_history(const Tensor& x);

/// Makes `x` output number `output` of `node`.
void set_history(const Tensor& x, std::shared_ptr<Node> node, int output);

}  // namespace mica::autograd

#pragma once

#include <memory>
#include <mutex>

#include <mica/autograd/inplace.h>
#include <mica/autograd/node.h>
#include <mica/autograd/trace.h>
#include <mica/core/tensor.h>

namespace mica::autograd {

/// What autograd remembers of one tensor.
struct Slot {
  bool requires_grad = false;                        // a leaf that asks for a gradient
  Tensor grad;                                       // … and what it has so far
  HookList<Hook> hooks;                              // … and who wants to see it first
  HookList<std::function<void()>> after_accumulate;  // … and who wants to know that it has grown
  std::weak_ptr<Node> accumulator;                   // … and the node that adds to it, while a graph uses it
  std::shared_ptr<Node> node;                        // the op that made this tensor; null for a leaf
  int output = 0;                                    // … as which of its outputs
  bool custom_view = false;      // … and it shares memory with an input, which only that op explains
  std::unique_ptr<Notes> notes;  // what to call it in messages; null for most
};

/// Where a tensor's gradient goes: to the op that made it, to a leaf's accumulator, or nowhere.
Edge gradient_edge(const Tensor& x);

/// The slot of `x`, or null if it has none. Every look at a tensor's place in the graph goes through here, as a view of
/// a tensor that was written in place has to learn of it first.
inline Slot* find_slot(const Tensor& x) {
  if (!x.defined()) {
    return nullptr;
  }
  const mica::detail::TensorImpl& impl = *x.handle();
  if (impl.base && impl.rewrites != impl.base->rewrites) [[unlikely]] {
    update_view(x);
  }
  return impl.slot.get();
}

/// The slot of `x`, made if it has none.
Slot& slot_of(const Tensor& x);

/// The elements of `x` without history, for autograd's own use: detach() is the user's, who may want it explained.
Tensor without_history(const Tensor& x);

/// Another handle to `x` as it is now, with its place in the graph. Of the histories that `x` gets later by writes in
/// place it knows nothing, so the graph may keep it without a cycle.
Tensor as_it_is(const Tensor& x);

/// Makes `x` output number `output` of `node`. What else shared the slot of `x`, that is, what was saved of it, keeps
/// its place in the graph.
void set_history(const Tensor& x, std::shared_ptr<Node> node, int output);

/// What guards a leaf's grad and accumulator, which graphs of several threads may share.
std::mutex& lock_of(const Slot& slot);

}  // namespace mica::autograd

#pragma once

#include <memory>
#include <mutex>

#include <mica/autograd/detail/trace.h>
#include <mica/autograd/node.h>
#include <mica/core/tensor.h>

namespace mica::autograd {

/// Autograd's data of one tensor.
struct Slot {
  bool requires_grad = false;                        // for a leaf: it accumulates a gradient
  Tensor grad;                                       // … the gradient accumulated so far
  HookList<Hook> hooks;                              // … hooks on incoming gradients
  HookList<std::function<void()>> after_accumulate;  // … hooks after accumulation
  std::weak_ptr<Node> accumulator;                   // … the node that accumulates into grad, while a graph uses it
  std::shared_ptr<Node> node;                        // the op that produced this tensor; null for a leaf
  int output = 0;                                    // … as this output
  bool custom_view = false;                          // … which is a view of an input, in a way that only the op knows
  std::unique_ptr<Notes> notes;                      // data for error messages; null for most tensors
};

/// Re-derives the history of a view whose base was written in place. Throws if that is not possible.
/// Defined in inplace.cpp.
void update_view(const Tensor& x);

/// The slot of `x`, or null. Every access to a tensor's history goes through here, since a view must first be updated
/// if its base was written in place.
inline Slot* find_slot(const Tensor& x) {
  if (!x.defined()) {
    return nullptr;
  }
  const mica::detail::TensorImpl& impl = *x.handle();
  if (impl.base && impl.history_version != impl.base->history_version) [[unlikely]] {
    update_view(x);
  }
  return impl.slot.get();
}

/// The slot of `x`, created if it has none.
Slot& slot_of(const Tensor& x);

/// The elements of `x` without history, for internal use; unlike detach(), it is not recorded as a cut for
/// DetectAnomaly.
Tensor without_history(const Tensor& x);

/// A new handle to the current value of `x`, with its current history. It does not follow later in-place
/// writes to `x`, so the graph can hold it without a cycle.
Tensor snapshot(const Tensor& x);

/// Makes `x` output number `output` of `node`. Snapshots with the old slot of `x` keep their history.
void set_history(const Tensor& x, std::shared_ptr<Node> node, int output);

/// The mutex for a leaf's grad and accumulator, which the graphs of several threads may share.
std::mutex& lock_of(const Slot& slot);

}  // namespace mica::autograd

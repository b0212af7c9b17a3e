#pragma once

#include <memory>
#include <unordered_set>
#include <vector>

#include <mica/core/tensor.h>

namespace mica::autograd {

/// While it exists, backward accumulates into these leaves as soon as their gradients are complete, and calls their
/// post-accumulate hooks then; it accumulates into other leaves last. So what has to be done with a gradient can be
/// done during backward: its reduction over several devices, an optimizer's step that frees it.
///
/// Gradients have the same bits as without it. But a backward that throws may have changed the grads of these leaves,
/// and a backward must not use a weight inside a checkpoint only when it is called again, since such a use cannot be
/// foreseen. While one exists, each backward first visits its whole graph, to find the last use of each of the leaves.
///
/// Throws, changing nothing, unless each tensor is a leaf that requires a gradient and is in no other
/// EarlyAccumulation.
class EarlyAccumulation {
 public:
  explicit EarlyAccumulation(const Tensors& leaves);
  ~EarlyAccumulation();
  EarlyAccumulation(const EarlyAccumulation&) = delete;
  EarlyAccumulation& operator=(const EarlyAccumulation&) = delete;

  using Leaves = std::unordered_set<const Slot*>;

  /// Those of all that exist now; null if none does.
  static std::shared_ptr<const Leaves> leaves();

 private:
  std::vector<std::shared_ptr<Slot>> slots_;
};

}  // namespace mica::autograd

#pragma once

#include <memory>
#include <unordered_set>
#include <vector>

#include <mica/core/tensor.h>

namespace mica::autograd {

/// While it exists, backward accumulates into these leaves, and calls their post-accumulate hooks, as soon as their
/// gradients are complete; it accumulates into other leaves last. So a gradient can be processed while backward
/// continues: reduced over several devices, or used by an optimizer's step and freed.
///
/// Gradients have the same bits as without it. But a backward that throws may have changed the grads of these leaves.
/// And the function of a checkpoint must use the same leaves when it is recomputed as in its first call, since backward
/// first visits its whole graph to find the op that will add to each leaf's gradient last.
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

  /// The leaves of all EarlyAccumulations that exist now; null if there are none.
  static std::shared_ptr<const Leaves> leaves();

 private:
  std::vector<std::shared_ptr<Slot>> slots_;
};

}  // namespace mica::autograd

#pragma once

#include <memory>
#include <unordered_set>
#include <utility>
#include <vector>

#include <mica/autograd/node.h>
#include <mica/autograd/thread_state.h>

namespace mica::autograd {

/// Ops that are recorded only when backward comes to them. One node stands for them until then. Its edges lead to all
/// that they used from outside and that needs a gradient: the ends of the ops that are recorded later.
class Segment : public Node {
 public:
  /// Where the gradients of the outputs go on, and they: into the ops, recorded now. Their edges lead to where this
  /// node's lead, so that everything goes on in the order that it would have had without the segment.
  virtual std::vector<std::pair<Edge, Tensor>> replay(const Tensors& gradients) = 0;

  Segment* as_segment() final { return this; }

  /// A segment has no gradients of its own to give: the engine calls replay().
  Tensors backward(Tensors gradients) final;
};

/// While it lives, ops on this thread are not recorded, but what they would have been recorded with is noted.
class SegmentWatch {
 public:
  SegmentWatch();
  ~SegmentWatch() { thread_state.segment = previous_; }
  SegmentWatch(const SegmentWatch&) = delete;
  SegmentWatch& operator=(const SegmentWatch&) = delete;

  /// That of this thread; null if there is none.
  static SegmentWatch* current() { return thread_state.segment; }

  /// What an op of the segment uses.
  void note_uses(const Tensor* const* inputs, std::size_t count);
  /// Gives `x`, which an op of the segment made, a place in the graph that leads nowhere.
  void place(const Tensor& x);
  /// Whether that is such a place.
  bool made(const Edge& edge) const { return edge.node == inside_; }

  /// A tensor from outside that must not have changed when the segment is replayed.
  struct Used {
    std::weak_ptr<mica::detail::TensorImpl> tensor;
    std::uint32_t version;
  };

  std::vector<Edge> edges;  // into the segment from outside, each once
  std::vector<Used> used;

 private:
  std::shared_ptr<Node> inside_;  // stands for all ops of the segment
  SegmentWatch* previous_;
  std::unordered_set<const mica::detail::TensorImpl*> seen_;
};

}  // namespace mica::autograd

#pragma once

#include <memory>
#include <unordered_set>
#include <utility>
#include <vector>

#include <mica/autograd/detail/thread_state.h>
#include <mica/autograd/node.h>

namespace mica::autograd {

/// A group of ops that are recorded only when backward reaches them; until then this node represents them. Its edges
/// lead to every tensor from outside that the ops use and that needs a gradient.
class Segment : public Node {
 public:
  /// Records the ops now. Returns where backward continues: edges into them, with the gradients. Their edges lead to
  /// the same nodes as this node's, so that backward proceeds in the same order as without the segment.
  virtual std::vector<std::pair<Edge, Tensor>> replay(const Tensors& gradients) = 0;

  Segment* as_segment() final { return this; }

  /// Never called: the engine calls replay() instead.
  Tensors backward(Tensors gradients) final;
};

/// While it exists, ops on this thread are not recorded. Instead, it collects the tensors from outside the segment that
/// recorded ops would have referred to.
class SegmentWatch {
 public:
  SegmentWatch();
  ~SegmentWatch() { thread_state.segment = previous_; }
  SegmentWatch(const SegmentWatch&) = delete;
  SegmentWatch& operator=(const SegmentWatch&) = delete;

  /// This thread's SegmentWatch, or null.
  static SegmentWatch* current() { return thread_state.segment; }

  /// Notes the inputs of an op of the segment.
  void note_uses(const Tensor* const* inputs, std::size_t count);
  /// Gives `x`, which an op of the segment produced, a placeholder as its node.
  void add_output(const Tensor& x);
  /// Whether the edge leads to the placeholder.
  bool made(const Edge& edge) const { return edge.node == inside_; }

  /// A tensor from outside, which must not change before the replay.
  struct Used {
    std::weak_ptr<mica::detail::TensorImpl> tensor;
    std::uint32_t version;
  };

  std::vector<Edge> edges;  // to tensors from outside, each once
  std::vector<Used> used;

 private:
  std::shared_ptr<Node> inside_;  // the placeholder of all ops of the segment
  SegmentWatch* previous_;
  std::unordered_set<const mica::detail::TensorImpl*> seen_;
};

}  // namespace mica::autograd

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <mica/autograd/hooks.h>
#include <mica/autograd/trace.h>
#include <mica/core/tensor.h>

namespace mica::autograd {

class Node;
class Segment;

/// Where a gradient goes next: into input `slot` of `node`'s backward, that is, the gradient of the node's
/// output number `slot`. No node: nobody needs it.
struct Edge {
  std::shared_ptr<Node> node;
  int slot = 0;
};

/// What an output looked like, so that its gradient can be checked, or made of zeros where nobody gave one.
struct OutputInfo {
  Shape shape;
  DType dtype = DType::float32;
  Device device;
};

/// From a gradient to the one that replaces it, or to an undefined tensor where it shall stay.
using Hook = std::function<Tensor(const Tensor& gradient)>;
/// From the gradients of a node's outputs to those that replace them, or to an empty list where they shall stay.
using PreHook = std::function<Tensors(const Tensors& gradients)>;
/// From what backward made of `gradients`, those of the inputs, to what replaces it, or to an empty list.
using PostHook = std::function<Tensors(const Tensors& results, const Tensors& gradients)>;

/// Shows the hook a gradient, if there is one, and takes the one it returns, if it does. Throws unless that is what
/// `expected` says.
void call_hook(const Hook& hook, Tensor& gradient, const OutputInfo& expected);

/// One recorded operation. Its edges lead to the nodes that made its inputs.
class Node {
 public:
  Node() : Node(next_sequence()) {}
  virtual ~Node() = default;
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  /// From the gradients of the outputs (undefined: zero) to those of the inputs, one for each edge (undefined: zero).
  virtual Tensors backward(Tensors gradients) = 0;
  virtual std::string name() const = 0;

  /// Calls `hook` just before backward runs through this node. Gradients that nobody sent are undefined.
  HookHandle register_prehook(PreHook hook);
  /// Calls `hook` just after backward has run through this node. Throws for a checkpoint, which has no gradients of its
  /// inputs: the ops that it computes again send them.
  HookHandle register_hook(PostHook hook);
  /// Calls `hook` with the gradient of one output when it is complete: what Tensor::register_hook does.
  HookHandle register_output_hook(int output, Hook hook);

  /// Let those see, and replace, gradients who asked for it by register_output_hook, register_prehook, register_hook.
  virtual void run_output_hooks(Tensors& gradients) const;
  void run_prehooks(Tensors& gradients) const;
  void run_hooks(Tensors& results, const Tensors& gradients) const;
  /// Whether run_hooks does anything.
  bool has_hooks() const { return hooks_ != nullptr && !hooks_->after.empty(); }

  /// Drops what was saved for backward.
  virtual void release() {}

  /// This, if it is one.
  virtual Segment* as_segment() { return nullptr; }

  /// What was saved for backward, as it stands there; for those who look at the graph from outside.
  virtual Tensors saved_tensors() const { return {}; }
  /// If this is the end of the graph at a leaf: that leaf's slot.
  virtual std::shared_ptr<Slot> leaf() const { return nullptr; }
  /// … and its elements, if they are still there.
  virtual std::shared_ptr<Storage> leaf_storage() const { return nullptr; }

  /// Nodes are numbered as they are made, so an op's number is above those of the ops its inputs came from: going
  /// by falling number is an order in which every gradient is complete before it is used.
  std::uint64_t sequence() const { return sequence_; }

  std::vector<Edge> edges;
  std::vector<OutputInfo> outputs;
  std::shared_ptr<ModuleName> module;  // that it was recorded in; null outside of all
  std::unique_ptr<Trace> trace;        // null unless DetectAnomaly was on

 protected:
  /// Older than every op: for the ends of the graph, which are made along with the first op that leads to them.
  static constexpr std::uint64_t kOldest = 0;

  explicit Node(std::uint64_t sequence) : sequence_(sequence) {}

 private:
  struct Hooks {
    HookList<std::pair<int, Hook>> of_outputs;
    HookList<PreHook> before;
    HookList<PostHook> after;
  };

  static std::uint64_t next_sequence();
  Hooks& hooks();

  std::uint64_t sequence_;
  std::unique_ptr<Hooks> hooks_;  // null until there is one
};

/// The only way to make a node. Nodes that become free while another is being destroyed are queued and destroyed
/// after it, so that a chain of a million does not recurse.
template <class T, class... Args>
std::shared_ptr<T> make_node(Args&&... args);

namespace detail {
void destroy(Node* node);
}

template <class T, class... Args>
std::shared_ptr<T> make_node(Args&&... args) {
  return std::shared_ptr<T>(new T(std::forward<Args>(args)...), [](Node* node) { detail::destroy(node); });
}

}  // namespace mica::autograd

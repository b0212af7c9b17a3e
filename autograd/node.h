#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <mica/autograd/detail/trace.h>
#include <mica/autograd/hooks.h>
#include <mica/core/tensor.h>

namespace mica::autograd {

class Node;
class Segment;

/// Where a gradient goes next: to output number `output` of `node`. A null node means that the gradient is not needed.
struct Edge {
  std::shared_ptr<Node> node;
  int output = 0;
};

/// Shape, dtype and device of an output, to validate its gradient or to materialize zeros.
struct OutputInfo {
  Shape shape;
  DType dtype = DType::float32;
  Device device;
};

/// Takes a gradient and returns its replacement, or an undefined tensor to keep it.
using Hook = std::function<Tensor(const Tensor& gradient)>;
/// Takes the gradients of a node's outputs and returns their replacements, or an empty list to keep them.
using PreHook = std::function<Tensors(const Tensors& gradients)>;
/// Takes the input gradients that backward computed from `gradients` and returns their replacements, or an empty list
/// to keep them.
using PostHook = std::function<Tensors(const Tensors& results, const Tensors& gradients)>;

/// Calls the hook with a defined gradient and replaces it by a defined result. Throws if the result does not match
/// `expected`.
void call_hook(const Hook& hook, Tensor& gradient, const OutputInfo& expected);

/// One recorded op. Its edges lead to the nodes that produced its inputs.
class Node {
 public:
  Node() : Node(next_sequence()) {}
  virtual ~Node();
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  /// Computes the input gradients, one per edge, from the output gradients. Undefined gradients are zero.
  virtual Tensors backward(Tensors gradients) = 0;
  virtual std::string name() const = 0;

  /// Calls `hook` just before this node's backward. Gradients that did not arrive are undefined.
  HookHandle register_prehook(PreHook hook);
  /// Calls `hook` just after this node's backward. Throws for a checkpoint, which has no input gradients: the
  /// recomputed ops produce them.
  HookHandle register_hook(PostHook hook);
  /// Calls `hook` with the complete gradient of one output; the implementation of Tensor::register_hook.
  HookHandle register_output_hook(int output, Hook hook);

  /// Run the hooks of register_output_hook, register_prehook and register_hook.
  virtual void run_output_hooks(Tensors& gradients) const;
  void run_prehooks(Tensors& gradients) const;
  void run_hooks(Tensors& results, const Tensors& gradients) const;
  /// Whether run_hooks does anything.
  bool has_hooks() const { return hooks_ != nullptr && !hooks_->after.empty(); }

  /// Frees what was saved for backward.
  virtual void release() {}

  /// This node if it is a Segment, else null.
  virtual Segment* as_segment() { return nullptr; }

  /// The tensors saved for backward, without version checks; for inspection of the graph.
  virtual Tensors saved_tensors() const { return {}; }
  /// The leaf's slot if this node accumulates into a leaf, else null.
  virtual std::shared_ptr<Slot> leaf() const { return nullptr; }
  /// The leaf's storage, if it still exists.
  virtual std::shared_ptr<Storage> leaf_storage() const { return nullptr; }

  /// Nodes are numbered in the order of creation, so an op's number is above those of its inputs' ops. In descending
  /// order every gradient is complete before it is used.
  std::uint64_t sequence() const { return sequence_; }

  std::vector<Edge> edges;
  std::vector<OutputInfo> outputs;
  std::shared_ptr<ModuleName> module;  // in which the op was recorded; null outside all modules
  std::unique_ptr<Trace> trace;        // null unless DetectAnomaly was on

 protected:
  /// Older than every op: for leaves' accumulators, which are created with the first op that uses the leaf.
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
  std::unique_ptr<Hooks> hooks_;  // null if there are none
};

/// Creates a node; the only way to do so. Nodes released while another node is destroyed are queued and destroyed after
/// it, so that destroying a chain of a million nodes does not recurse.
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

#include <algorithm>
#include <mutex>
#include <queue>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <mica/autograd/anomaly.h>
#include <mica/autograd/autocast.h>
#include <mica/autograd/detail/accumulate.h>
#include <mica/autograd/detail/add_gradients.h>
#include <mica/autograd/detail/engine.h>
#include <mica/autograd/detail/gradient_check.h>
#include <mica/autograd/detail/op_observer.h>
#include <mica/autograd/detail/segment.h>
#include <mica/autograd/detail/slot.h>
#include <mica/autograd/early_accumulation.h>
#include <mica/autograd/grad_mode.h>
#include <mica/core/creation.h>

namespace mica::autograd {

namespace {

/// The order in which a backward runs its nodes: highest priority first. A leaf in an EarlyAccumulation comes just
/// after the oldest op that uses it; other leaves come last.
class RunOrder {
 public:
  RunOrder() = default;
  /// Visits the graph. An op that a checkpoint will record needs no visit: it is newer than the checkpoint's Segment,
  /// whose edges lead to the same leaves.
  RunOrder(const std::vector<Root>& roots, const EarlyAccumulation::Leaves& leaves) {
    std::unordered_set<const Node*> seen;
    std::vector<const Node*> found;
    const auto find = [&](const Node* node) {
      if (seen.insert(node).second) {
        found.push_back(node);
      }
    };
    for (const Root& root : roots) {
      find(root.edge.node.get());
    }
    while (!found.empty()) {
      const Node* const node = found.back();
      found.pop_back();
      for (const Edge& edge : node->edges) {
        if (edge.node == nullptr) {
          continue;
        }
        if (!edge.node->edges.empty()) {
          find(edge.node.get());
        } else if (const std::shared_ptr<Slot> leaf = edge.node->leaf(); leaves.contains(leaf.get())) {
          const auto [at, is_new] = early_.try_emplace(edge.node.get(), edge.node, node->sequence());
          at->second.oldest_use = std::min(at->second.oldest_use, node->sequence());
        }
      }
    }
  }

  std::uint64_t of(const Node& node) const {
    if (!early_.empty() && node.edges.empty()) {  // true for the accumulators of leaves
      if (const auto at = early_.find(&node); at != early_.end()) {
        return 2 * at->second.oldest_use - 1;
      }
    }
    return 2 * node.sequence();
  }

 private:
  struct Early {
    Early(std::shared_ptr<Node> node, std::uint64_t use) : accumulator(std::move(node)), oldest_use(use) {}

    std::shared_ptr<Node> accumulator;  // kept, so that no new node gets its address
    std::uint64_t oldest_use;
  };

  std::unordered_map<const Node*, Early> early_;
};

/// Pending gradients: per node reached so far, one gradient for each of its outputs.
class Frontier {
 public:
  explicit Frontier(const RunOrder& run_order) : run_order_(run_order) {}

  bool empty() const { return order_.empty(); }

  void add(const Edge& edge, Tensor gradient) {
    auto [at, is_new] = gradients_.try_emplace(edge.node.get());
    Tensors& gradients = at->second;
    if (is_new) {
      gradients.resize(edge.node->outputs.size());
      order_.push({run_order_.of(*edge.node), edge.node});
    }
    Tensor& sum = gradients[edge.output];
    const bool in_place = borrowed_.contains(edge.node.get());
    sum = sum.defined() ? add_gradients(std::move(sum), gradient, in_place) : std::move(gradient);
  }

  /// Removes and returns the pending gradient of `edge`, to be added to in place; undefined if there is none or its
  /// memory is shared. For a leaf, if `leaves` allows it, this may be the grad from earlier passes.
  Tensor extract(const Edge& edge, bool leaves) {
    const auto at = gradients_.find(edge.node.get());
    if (at != gradients_.end() && at->second[edge.output].defined()) {
      Tensor& pending = at->second[edge.output];
      const bool writable = borrowed_.contains(edge.node.get()) || is_unshared(pending);
      return writable && pending.is_contiguous() ? std::exchange(pending, {}) : Tensor{};
    }
    const std::shared_ptr<Slot> leaf = leaves && !edge.node->has_hooks() ? edge.node->leaf() : nullptr;
    if (leaf == nullptr || !leaf->hooks.empty()) {
      return {};
    }
    const std::lock_guard lock(lock_of(*leaf));
    const Tensor& grad = leaf->grad;
    const OutputInfo& expected = edge.node->outputs[0];
    // On the CPU, another thread could accumulate concurrently; work on a GPU's stream is ordered.
    if (!grad.defined() || !grad.device().is_cuda() || !grad.is_contiguous() || grad.handle()->slot ||
        grad.shape() != expected.shape || grad.dtype() != expected.dtype || grad.device() != expected.device) {
      return {};
    }
    borrowed_.insert(edge.node.get());
    return grad;
  }

  /// The pending node with the highest priority: no other pending node can contribute to its gradients.
  std::pair<std::shared_ptr<Node>, Tensors> pop() {
    std::shared_ptr<Node> node = order_.top().node;
    order_.pop();
    auto entry = gradients_.extract(node.get());
    return {std::move(node), std::move(entry.mapped())};
  }

 private:
  struct Pending {
    std::uint64_t priority;
    std::shared_ptr<Node> node;
    bool operator<(const Pending& other) const { return priority < other.priority; }
  };

  const RunOrder& run_order_;
  std::priority_queue<Pending> order_;
  std::unordered_map<Node*, Tensors> gradients_;
  std::unordered_set<const Node*> borrowed_;  // accumulators of leaves from which extract() took `grad` itself
};

// The node whose backward this thread is running, and the pending gradients. Backward passes can be nested.
struct Running {
  const Node& node;
  Frontier& frontier;
  bool adds_to_leaves;
};
thread_local const Running* running = nullptr;

class RunningGuard {
 public:
  explicit RunningGuard(const Running& now) : outer_(std::exchange(running, &now)) {}
  ~RunningGuard() { running = outer_; }
  RunningGuard(const RunningGuard&) = delete;
  RunningGuard& operator=(const RunningGuard&) = delete;

 private:
  const Running* outer_;
};

// Runs a node's hooks and backward, and adds the results to the pending gradients.
void run(Node& node, Tensors gradients, GradientCheck& anomalies, Frontier& frontier, bool adds_to_leaves) {
  node.run_prehooks(gradients);
  anomalies.prehooked(node, gradients);
  if (Segment* const segment = node.as_segment()) {
    for (auto& [edge, gradient] : segment->replay(gradients)) {
      frontier.add(edge, std::move(gradient));
    }
    return;
  }
  const ObservedOp observed(node);
  const bool has_hooks = node.has_hooks();
  const Running now{node, frontier, adds_to_leaves};
  const RunningGuard running_guard(now);
  const Tensors for_hooks = has_hooks ? gradients : Tensors();
  Tensors results = node.backward(std::move(gradients));
  anomalies.made(node, results);
  if (has_hooks) {
    node.run_hooks(results, for_hooks);
    anomalies.posthooked(node, results);
  }
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (results[i].defined()) {
      frontier.add(node.edges[i], std::move(results[i]));
    }
  }
}

}  // namespace

Tensor take_pending_gradient(std::size_t i) {
  if (running == nullptr || grad_enabled() || running->node.has_hooks()) {
    return {};
  }
  const Edge& edge = running->node.edges.at(i);
  return edge.node == nullptr ? Tensor{} : running->frontier.extract(edge, running->adds_to_leaves);
}

Root root_of(const char* op, const Tensor& output, const Tensor& gradient) {
  check(output.defined(), "{}: expected a defined tensor, got an undefined one", op);
  Edge edge = gradient_edge(output);
  check(edge.node != nullptr,
        "{}: the tensor of shape {} does not require a gradient: nothing it was computed from has requires_grad, or it "
        "was computed while recording was off",
        op, output.shape());
  if (!gradient.defined()) {
    check(output.numel() == 1, "{}: a tensor of shape {} is not a scalar and needs an explicit gradient", op,
          output.shape());
    return {std::move(edge), ones_like(output)};
  }
  check(
      gradient.shape() == output.shape() && gradient.dtype() == output.dtype() && gradient.device() == output.device(),
      "{}: expected a gradient of {} {} on {}, got {} {} on {}", op, output.dtype(), output.shape(), output.device(),
      gradient.dtype(), gradient.shape(), gradient.device());
  return {std::move(edge), gradient};
}

void traverse(const std::vector<Root>& roots, TraverseOptions options, Visitor& visitor) {
  const InferenceMode ordinary(false);  // gradients outlive an inference mode around backward
  const InsideOp guard(!options.record);
  const Autocast off(std::nullopt);  // dtypes were chosen in forward
  GradientCheck anomalies;
  const auto early = options.early_leaves ? EarlyAccumulation::leaves() : nullptr;
  const RunOrder order = early == nullptr ? RunOrder() : RunOrder(roots, *early);
  Frontier frontier(order);
  for (const Root& root : roots) {
    anomalies.given(root.gradient);
    frontier.add(root.edge, root.gradient);
  }
  while (!frontier.empty()) {
    auto [node, gradients] = frontier.pop();
    anomalies.arrived(*node, gradients);
    node->run_output_hooks(gradients);
    anomalies.hooked(*node, gradients);
    if (!visitor.enters(*node, gradients)) {
      continue;
    }
    run(*node, std::move(gradients), anomalies, frontier, options.adds_to_leaves && !anomaly_enabled());
    if (node->as_segment() != nullptr) {
      visitor.replayed();
    }
    if (!options.retain_graph) {
      node->release();
    }
  }
}

void backward(const Tensor& root, const Tensor& gradient, BackwardOptions options) {
  Visitor all;
  traverse({root_of("backward", root, gradient)},
           {.retain_graph = options.retain_graph, .record = false, .adds_to_leaves = true, .early_leaves = true}, all);
}

}  // namespace mica::autograd

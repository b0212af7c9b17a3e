#include <algorithm>
#include <mutex>
#include <queue>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <mica/autograd/accumulate.h>
#include <mica/autograd/anomaly.h>
#include <mica/autograd/autocast.h>
#include <mica/autograd/engine.h>
#include <mica/autograd/grad.h>
#include <mica/autograd/grad_mode.h>
#include <mica/autograd/gradient_check.h>
#include <mica/autograd/op_observer.h>
#include <mica/autograd/segment.h>
#include <mica/autograd/slot.h>
#include <mica/core/creation.h>

namespace mica::autograd {

namespace {

/// Pending gradients: per node reached so far, one gradient for each of its outputs.
class Frontier {
 public:
  bool empty() const { return order_.empty(); }

  void add(const Edge& edge, Tensor gradient) {
    auto [at, is_new] = gradients_.try_emplace(edge.node.get());
    Tensors& slots = at->second;
    if (is_new) {
      slots.resize(edge.node->outputs.size());
      order_.push(edge.node);
    }
    Tensor& slot = slots[edge.slot];
    const bool in_place = borrowed_.contains(edge.node.get());
    slot = slot.defined() ? add_gradients(std::move(slot), gradient, in_place) : std::move(gradient);
  }

  /// Removes and returns the pending gradient of `edge`, to be added to in place; undefined if there is none or its
  /// memory is shared. For a leaf, if `leaves` allows it, this may be the grad from earlier passes.
  Tensor extract(const Edge& edge, bool leaves) {
    const auto at = gradients_.find(edge.node.get());
    if (at != gradients_.end() && at->second[edge.slot].defined()) {
      Tensor& pending = at->second[edge.slot];
      return borrowed_.contains(edge.node.get()) || is_unshared(pending) ? std::exchange(pending, {}) : Tensor{};
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

  /// The newest pending node: no other pending node can contribute to its gradients.
  std::pair<std::shared_ptr<Node>, Tensors> pop() {
    std::shared_ptr<Node> node = order_.top();
    order_.pop();
    auto entry = gradients_.extract(node.get());
    return {std::move(node), std::move(entry.mapped())};
  }

 private:
  struct Older {
    bool operator()(const std::shared_ptr<Node>& a, const std::shared_ptr<Node>& b) const {
      return a->sequence() < b->sequence();
    }
  };

  std::priority_queue<std::shared_ptr<Node>, std::vector<std::shared_ptr<Node>>, Older> order_;
  std::unordered_map<Node*, Tensors> gradients_;
  std::unordered_set<const Node*> borrowed_;  // leaves' accumulators for which their `grad` itself was taken
};

// The start of a backward pass.
struct Root {
  Edge edge;
  Tensor gradient;
};

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

// The node whose backward this thread runs, and what is pending meanwhile. A backward may run another one inside.
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

// Backpropagates through the graph, newest node first. With adds_to_leaves, ops may add directly to the `grad` of a
// leaf, instead of its accumulator. visit(node, gradients) receives each node with its complete output gradients and
// returns whether to continue through it. replayed() is called after a checkpoint has added nodes.
template <class Visit, class Replayed>
void traverse(const std::vector<Root>& roots, bool retain_graph, bool record, bool adds_to_leaves, Visit&& visit,
              Replayed&& replayed) {
  const InferenceMode ordinary(false);  // gradients outlive an inference mode around backward
  const InsideOp guard(!record);
  const Autocast off(std::nullopt);  // dtypes were chosen in forward
  GradientCheck anomalies;
  Frontier frontier;
  for (const Root& root : roots) {
    anomalies.given(root.gradient);
    frontier.add(root.edge, root.gradient);
  }
  while (!frontier.empty()) {
    auto [node, gradients] = frontier.pop();
    anomalies.arrived(*node, gradients);
    node->run_output_hooks(gradients);
    anomalies.hooked(*node, gradients);
    if (!visit(*node, gradients)) {
      continue;
    }
    run(*node, std::move(gradients), anomalies, frontier, adds_to_leaves && !anomaly_enabled());
    if (node->as_segment() != nullptr) {
      replayed();
    }
    if (!retain_graph) {
      node->release();
    }
  }
}

// The nodes on paths from the outputs to the requested inputs.
template <class Ends>
class PathFilter {
 public:
  PathFilter(const std::vector<Root>& roots, const Ends& ends) : ends_(ends) {
    std::vector<const Node*> found;
    for (const Root& root : roots) {
      find(root.edge.node.get(), leads_, found);
    }
    explore(std::move(found), leads_);
  }

  bool contains(const Node& node) {
    if (const auto at = leads_.find(&node); at != leads_.end()) {
      return at->second;
    }
    if (!replayed_.contains(&node)) {
      std::vector<const Node*> found;
      find(&node, replayed_, found);
      explore(std::move(found), replayed_);
    }
    return replayed_.at(&node);
  }

  /// Nodes added during the pass are also destroyed during the pass, and new ones may reuse their addresses.
  void clear_replayed() { replayed_.clear(); }

 private:
  using Leads = std::unordered_map<const Node*, bool>;

  void find(const Node* node, Leads& leads, std::vector<const Node*>& found) {
    if (node != nullptr && (&leads == &leads_ || !leads_.contains(node)) && leads.try_emplace(node, false).second) {
      found.push_back(node);
    }
  }

  // Computes the entries of all nodes reachable from `found`.
  void explore(std::vector<const Node*> found, Leads& leads) {
    for (std::size_t i = 0; i < found.size(); ++i) {
      for (const Edge& edge : found[i]->edges) {
        find(edge.node.get(), leads, found);
      }
    }
    // Oldest first, so that the entries of a node's edges are known before its own.
    std::sort(found.begin(), found.end(), [](const Node* a, const Node* b) { return a->sequence() < b->sequence(); });
    for (const Node* node : found) {
      leads[node] = std::any_of(node->edges.begin(), node->edges.end(), [&](const Edge& edge) {
        return edge.node != nullptr && (ends_.contains(edge.node.get()) || leads_to_end(edge.node.get()));
      });
    }
  }

  bool leads_to_end(const Node* node) const {
    const auto at = leads_.find(node);
    return at != leads_.end() ? at->second : replayed_.at(node);
  }

  const Ends& ends_;
  Leads leads_;     // of the graph at the start
  Leads replayed_;  // of nodes that checkpoints recorded since
};

}  // namespace

Tensor take_pending_gradient(std::size_t i) {
  if (running == nullptr || grad_enabled() || running->node.has_hooks()) {
    return {};
  }
  const Edge& edge = running->node.edges.at(i);
  return edge.node == nullptr ? Tensor{} : running->frontier.extract(edge, running->adds_to_leaves);
}

void backward(const Tensor& root, const Tensor& gradient, BackwardOptions options) {
  traverse(
      {root_of("backward", root, gradient)}, options.retain_graph, /*record=*/false, /*adds_to_leaves=*/true,
      [](Node&, const Tensors&) { return true; }, [] {});
}

Tensors grad(const Tensors& outputs, const Tensors& inputs, const Tensors& gradients, GradOptions options) {
  check(!outputs.empty(), "grad: expected at least one output");
  check(gradients.empty() || gradients.size() == outputs.size(),
        "grad: expected {} gradients, one for each output, got {}", outputs.size(), gradients.size());
  std::vector<Root> roots;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    roots.push_back(root_of("grad", outputs[i], gradients.empty() ? Tensor{} : gradients[i]));
  }
  std::vector<Edge> ends;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check(inputs[i].defined(), "grad: expected a defined input {}, got an undefined one", i);
    ends.push_back(gradient_edge(inputs[i]));
    check(ends.back().node != nullptr, "grad: input {} of shape {} does not require a gradient", i, inputs[i].shape());
  }

  std::unordered_map<const Node*, std::vector<std::size_t>> inputs_at;
  for (std::size_t i = 0; i < ends.size(); ++i) {
    inputs_at[ends[i].node.get()].push_back(i);
  }
  Tensors results(inputs.size());
  PathFilter paths(roots, inputs_at);
  traverse(
      roots, options.retain_graph || options.create_graph, options.create_graph, /*adds_to_leaves=*/false,
      [&](const Node& node, const Tensors& arrived) {
        if (const auto at = inputs_at.find(&node); at != inputs_at.end()) {
          for (const std::size_t i : at->second) {
            results[i] = arrived[ends[i].slot];
          }
        }
        return paths.contains(node);
      },
      [&] { paths.clear_replayed(); });
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    check(results[i].defined() || options.allow_unused,
          "grad: the outputs do not depend on input {} of shape {}; pass {{.allow_unused = true}} for an undefined "
          "gradient instead",
          i, inputs[i].shape());
    if (results[i].defined() && !options.create_graph) {
      results[i] = unshared(std::move(results[i]));  // the caller may write it in place
    }
  }
  return results;
}

}  // namespace mica::autograd

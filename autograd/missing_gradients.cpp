#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include <mica/autograd/detail/accumulate.h>
#include <mica/autograd/detail/diagnostics.h>
#include <mica/autograd/detail/slot.h>
#include <mica/autograd/missing_gradients.h>

namespace mica::autograd {

namespace {

/// The graph of a loss.
class LossGraph {
 public:
  explicit LossGraph(const Tensor& loss) {
    if (const Slot* const slot = find_slot(loss); slot != nullptr && slot->notes) {
      is_traced_ = true;
      add(slot->notes->cuts);
    }
    std::vector<const Node*> pending;
    const auto find = [&](const Node* node, bool has_gradient) {
      bool& known = reached_.try_emplace(node, false).first->second;
      if (nodes_.insert(node).second || (has_gradient && !known)) {
        known = known || has_gradient;
        pending.push_back(node);
      }
    };
    if (const Edge root = gradient_edge(loss); root.node != nullptr) {
      find(root.node.get(), true);
    }
    while (!pending.empty()) {
      const Node* const node = pending.back();
      pending.pop_back();
      if (node->trace) {
        is_traced_ = true;
        add(node->trace->cuts);
      }
      for (std::size_t i = 0; i < node->edges.size(); ++i) {
        const Node* const next = node->edges[i].node.get();
        if (next == nullptr) {
          continue;
        }
        const bool stops = returned_none(*node, i);
        if (stops) {
          stopped_.emplace(next, std::pair{node, i});
        }
        find(next, reached_.at(node) && !stops);
      }
    }
  }

  /// Whether DetectAnomaly was on in forward.
  bool is_traced() const { return is_traced_; }

  /// Whether the loss depends on the leaf, and whether every path contains an op known to have returned no gradient.
  bool leads_to(const Node* leaf) const { return leaf != nullptr && nodes_.contains(leaf); }
  bool is_stopped(const Node* leaf) const { return !reached_.at(leaf); }

  /// The op on a path to the leaf that returned no gradient; null if unknown. Searches upwards from the leaf.
  std::string stop_before(const Node* leaf) const;

  const Cut* cut_of(const Slot* leaf) const {
    const auto at = cuts_.find(leaf);
    return at == cuts_.end() ? nullptr : at->second.get();
  }

 private:
  static bool returned_none(const Node& node, std::size_t input) {
    return node.trace && std::count(node.trace->undefined.begin(), node.trace->undefined.end(), input) > 0;
  }

  void add(const Cuts& cuts) {
    for (const auto& [leaf, cut] : cuts) {
      if (const std::shared_ptr<Slot> alive = leaf.lock()) {
        cuts_.try_emplace(alive.get(), cut);
      }
    }
  }

  bool is_traced_ = false;
  std::unordered_set<const Node*> nodes_;
  std::unordered_map<const Node*, bool> reached_;  // whether a gradient can have reached the node
  std::unordered_map<const Node*, std::pair<const Node*, std::size_t>> stopped_;
  std::unordered_map<const Slot*, std::shared_ptr<const Cut>> cuts_;
};

// All nodes with edges to the leaf are in the loss's graph, so one of them stopped the gradient.
std::string LossGraph::stop_before(const Node* leaf) const {
  std::unordered_multimap<const Node*, const Node*> users;
  for (const Node* const node : nodes_) {
    for (const Edge& edge : node->edges) {
      users.emplace(edge.node.get(), node);
    }
  }
  std::vector<const Node*> pending{leaf};
  std::unordered_set<const Node*> seen{leaf};
  while (!pending.empty()) {
    const Node* const node = pending.back();
    pending.pop_back();
    if (const auto at = stopped_.find(node); at != stopped_.end()) {
      const auto& [op, input] = at->second;
      return fmt::format("the backward of {} returned no gradient for input {}{}", op->name(), input, where(*op));
    }
    const auto [first, last] = users.equal_range(node);
    for (auto user = first; user != last; ++user) {
      if (seen.insert(user->second).second) {
        pending.push_back(user->second);
      }
    }
  }
  return "";
}

MissingGradient explain(const LossGraph& graph, const std::string& name, const Tensor& parameter) {
  if (!parameter.requires_grad()) {
    return {name, Missing::frozen, "frozen: its requires_grad is false"};
  }
  const Edge edge = gradient_edge(parameter);
  if (graph.leads_to(edge.node.get())) {
    const std::string stop = graph.stop_before(edge.node.get());
    return {name, Missing::undefined,
            stop.empty() ? "no gradient arrived, although the loss depends on it: backward() has not run, or an op on "
                           "the way returned none (enable DetectAnomaly in forward and backward to see which)"
                         : stop};
  }
  if (const Cut* const cut = graph.cut_of(parameter.handle()->slot.get())) {
    return {name, Missing::cut, "cut off by " + cut->what + where(cut->module, &cut->call_site)};
  }
  return {name, Missing::unused,
          graph.is_traced()
              ? "unused: no op that the loss depends on has it as input"
              : "unused, or cut off: the loss does not depend on it (enable DetectAnomaly in forward to see where)"};
}

}  // namespace

std::vector<MissingGradient> explain_missing_gradients(const Tensor& loss,
                                                       const std::vector<std::pair<std::string, Tensor>>& parameters) {
  check(loss.defined(), "explain_missing_gradients: expected a defined loss");
  const LossGraph graph(loss);
  std::vector<MissingGradient> result;
  for (const auto& [name, parameter] : parameters) {
    check(parameter.defined(), "explain_missing_gradients: parameter {} is an undefined tensor", name);
    const Edge edge = gradient_edge(parameter);
    const bool arrived =
        graph.leads_to(edge.node.get()) && !graph.is_stopped(edge.node.get()) && parameter.grad().defined();
    if (!arrived) {
      result.push_back(explain(graph, name, parameter));
    }
  }
  return result;
}

std::string to_string(const std::vector<MissingGradient>& missing) {
  std::string text;
  for (const MissingGradient& entry : missing) {
    text += entry.name + ": " + entry.text + "\n";
  }
  return text;
}

}  // namespace mica::autograd

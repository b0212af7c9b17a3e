#include <algorithm>
#include <unordered_map>
#include <utility>
#include <vector>

#include <mica/autograd/detail/accumulate.h>
#include <mica/autograd/detail/engine.h>
#include <mica/autograd/detail/slot.h>
#include <mica/autograd/grad.h>

namespace mica::autograd {

namespace {

// The inputs whose gradients arrive at a node.
using Ends = std::unordered_map<const Node*, std::vector<std::size_t>>;

// The nodes on paths from the outputs to the requested inputs.
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

// Collects the gradients that arrive at `edges`, the inputs, and enters only nodes on paths to them.
class Collector : public Visitor {
 public:
  Collector(const std::vector<Root>& roots, const std::vector<Edge>& edges)
      : edges_(edges), ends_(ends_of(edges)), paths_(roots, ends_), gradients_(edges.size()) {}

  bool enters(const Node& node, const Tensors& arrived) override {
    if (const auto at = ends_.find(&node); at != ends_.end()) {
      for (const std::size_t i : at->second) {
        gradients_[i] = arrived[edges_[i].output];
      }
    }
    return paths_.contains(node);
  }
  void replayed() override { paths_.clear_replayed(); }

  /// One per input; undefined where none arrived.
  Tensors take_gradients() { return std::move(gradients_); }

 private:
  static Ends ends_of(const std::vector<Edge>& edges) {
    Ends ends;
    for (std::size_t i = 0; i < edges.size(); ++i) {
      ends[edges[i].node.get()].push_back(i);
    }
    return ends;
  }

  const std::vector<Edge>& edges_;
  Ends ends_;
  PathFilter paths_;
  Tensors gradients_;
};

}  // namespace

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

  Collector collector(roots, ends);
  traverse(roots, {.retain_graph = options.retain_graph || options.create_graph, .record = options.create_graph},
           collector);
  Tensors results = collector.take_gradients();
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

#include <queue>
#include <unordered_map>

#include <mica/autograd/accumulate.h>
#include <mica/autograd/engine.h>
#include <mica/autograd/grad_mode.h>
#include <mica/autograd/slot.h>
#include <mica/core/creation.h>

namespace mica::autograd {

namespace {

/// The gradients on their way: for each node that some have reached, one for each of its outputs.
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
    slot = slot.defined() ? add_gradients(std::move(slot), gradient) : std::move(gradient);
  }

  /// The newest node: no other on its way can still send it a gradient.
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
};

void run_hooks(const Node& node, Tensors& gradients) {
  for (const auto& [output, hook] : node.hooks) {
    if (gradients[output].defined()) {
      if (Tensor replaced = hook(gradients[output]); replaced.defined()) {
        gradients[output] = std::move(replaced);
      }
    }
  }
}

}  // namespace

void backward(const Tensor& root, const Tensor& gradient, BackwardOptions options) {
  check(root.defined(), "backward: expected a defined tensor, got an undefined one");
  const Edge start = gradient_edge(root);
  check(start.node != nullptr,
        "backward: the tensor of shape {} does not require a gradient: nothing it was computed from has "
        "requires_grad, or it was computed while recording was off",
        root.shape());
  if (gradient.defined()) {
    check(gradient.shape() == root.shape() && gradient.dtype() == root.dtype() && gradient.device() == root.device(),
          "backward: expected a gradient of {} {} on {}, got {} {} on {}", root.dtype(), root.shape(), root.device(),
          gradient.dtype(), gradient.shape(), gradient.device());
  } else {
    check(root.numel() == 1, "backward: a tensor of shape {} is not a scalar and needs a gradient to start from",
          root.shape());
  }

  const NoGrad guard;
  Frontier frontier;
  frontier.add(start, gradient.defined() ? gradient : ones_like(root));
  while (!frontier.empty()) {
    auto [node, gradients] = frontier.pop();
    run_hooks(*node, gradients);
    Tensors results = node->backward(std::move(gradients));
    for (std::size_t i = 0; i < results.size(); ++i) {
      if (results[i].defined()) {
        frontier.add(node->edges[i], std::move(results[i]));
      }
    }
    if (!options.retain_graph) {
      node->release();
    }
  }
}

}  // namespace mica::autograd

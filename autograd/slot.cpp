#include <mutex>

#include <mica/autograd/accumulate.h>
#include <mica/autograd/slot.h>

namespace mica::autograd {

namespace {

/// The end of every path through the graph: adds what arrives to a leaf's grad.
class AccumulateGrad final : public Node {
 public:
  explicit AccumulateGrad(std::shared_ptr<Slot> slot, const Tensor& leaf) : Node(kOldest), slot_(std::move(slot)) {
    outputs.push_back({leaf.shape(), leaf.dtype(), leaf.device()});
  }

  std::string name() const override { return "AccumulateGrad"; }
  std::shared_ptr<Slot> leaf() const override { return slot_; }

  void run_hooks(Tensors& gradients) const override {
    for (const Hook& hook : slot_->hooks) {
      call_hook(hook, gradients[0]);
    }
  }

  Tensors backward(Tensors gradients) override {
    Tensor gradient = std::move(gradients[0]);
    if (!gradient.defined()) {
      return {};
    }
    // The grad outlives the graph and its owner may write it in place, so it must be nobody else's memory.
    slot_->grad = slot_->grad.defined() ? add_gradients(std::move(slot_->grad), gradient, /*in_place=*/true)
                                        : unshared(std::move(gradient));
    return {};
  }

 private:
  std::shared_ptr<Slot> slot_;
};

}  // namespace

Slot& slot_of(const Tensor& x) {
  std::shared_ptr<Slot>& slot = x.handle()->slot;
  if (!slot) {
    slot = std::make_shared<Slot>();
  }
  return *slot;
}

Edge gradient_edge(const Tensor& x) {
  if (!x.defined() || !x.handle()->slot) {
    return {};
  }
  const std::shared_ptr<Slot>& slot = x.handle()->slot;
  if (slot->node) {
    return {slot->node, slot->output};
  }
  if (!slot->requires_grad) {
    return {};
  }
  // Graphs built on two threads may share a leaf.
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  std::shared_ptr<Node> accumulator = slot->accumulator.lock();
  if (!accumulator) {
    accumulator = make_node<AccumulateGrad>(slot, x);
    slot->accumulator = accumulator;
  }
  return {std::move(accumulator), 0};
}

Tensor without_history(const Tensor& x) { return as_strided(x, x.shape(), x.strides(), x.handle()->offset); }

void set_history(const Tensor& x, std::shared_ptr<Node> node, int output) {
  Slot& slot = slot_of(x);
  slot.node = std::move(node);
  slot.output = output;
}

}  // namespace mica::autograd

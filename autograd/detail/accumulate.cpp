#include <mica/autograd/detail/accumulate.h>
#include <mica/autograd/detail/slot.h>
#include <mica/core/channels_last.h>
#include <mica/core/copy.h>

namespace mica::autograd {

namespace {

/// The end of every path through the graph: accumulates into a leaf's grad.
class AccumulateGrad final : public Node {
 public:
  explicit AccumulateGrad(std::shared_ptr<Slot> slot, const Tensor& leaf)
      : Node(kOldest), slot_(std::move(slot)), storage_(leaf.handle()->storage) {
    outputs.push_back({leaf.shape(), leaf.dtype(), leaf.device()});
  }

  std::string name() const override { return "AccumulateGrad"; }
  std::shared_ptr<Slot> leaf() const override { return slot_; }
  std::shared_ptr<Storage> leaf_storage() const override { return storage_.lock(); }

  void run_output_hooks(Tensors& gradients) const override {
    slot_->hooks.each([&](const Hook& hook) { call_hook(hook, gradients[0], outputs[0]); });
  }

  Tensors backward(Tensors gradients) override {
    Tensor gradient = std::move(gradients[0]);
    if (!gradient.defined()) {
      return {};
    }
    {
      const std::lock_guard lock(lock_of(*slot_));
      check(slot_->accumulator.lock().get() == this,
            "backward: set_data has replaced a leaf of {} {} on {} since the graph was recorded", outputs[0].dtype,
            outputs[0].shape, outputs[0].device);
      // The grad outlives the graph, and its owner may write it in place, so its memory must not be shared.
      if (slot_->grad.defined() && gradient.is_same(slot_->grad)) {  // an op has added to it: take_pending_gradient()
        slot_->grad.bump_version("backward");
      } else if (slot_->grad.defined()) {
        add_into(slot_->grad, gradient);
        slot_->grad.bump_version("backward");
      } else {
        slot_->grad = gradient.is_contiguous() ? unshared(std::move(gradient)) : contiguous_data(gradient);
      }
    }
    slot_->after_accumulate.each([](const std::function<void()>& hook) { hook(); });
    return {};
  }

 private:
  std::shared_ptr<Slot> slot_;
  std::weak_ptr<Storage> storage_;
};

}  // namespace

bool is_unshared(const Tensor& x) {
  return x.handle().use_count() == 1 && x.handle()->storage.use_count() == 1 && !x.handle()->slot &&
         (x.is_contiguous() || is_channels_last(x));
}

Tensor unshared(Tensor gradient) {
  if (is_unshared(gradient)) {
    return gradient;
  }
  const Tensor copy = empty_in_layout(gradient.shape(), gradient);
  copy_into(copy, gradient);
  return copy;
}

Edge gradient_edge(const Tensor& x) {
  if (find_slot(x) == nullptr) {
    return {};
  }
  const std::shared_ptr<Slot>& slot = x.handle()->slot;
  if (slot->node) {
    return {slot->node, slot->output};
  }
  if (!slot->requires_grad) {
    return {};
  }
  const std::lock_guard lock(lock_of(*slot));
  std::shared_ptr<Node> accumulator = slot->accumulator.lock();
  if (!accumulator) {
    accumulator = make_node<AccumulateGrad>(slot, x);
    slot->accumulator = accumulator;
  }
  return {std::move(accumulator), 0};
}

}  // namespace mica::autograd

// Tensor's autograd members.

#include <mica/autograd/anomaly.h>
#include <mica/autograd/detail/diagnostics.h>
#include <mica/autograd/detail/engine.h>
#include <mica/autograd/detail/slot.h>
#include <mica/autograd/grad_mode.h>
#include <mica/core/detail/callable.h>
#include <mica/core/tensor.h>

namespace mica {

using autograd::find_slot;

bool Tensor::requires_grad() const {
  const autograd::Slot* slot = find_slot(*this);
  return slot != nullptr && (slot->node != nullptr || slot->requires_grad);
}

const Tensor& Tensor::requires_grad_(bool on) const {
  check(!on || is_floating(dtype()), "requires_grad_: a tensor of {} cannot have a gradient; only floating dtypes can",
        dtype());
  check(is_leaf(),
        "requires_grad_: expected a leaf, got the result of an op; detach() returns a tensor without history");
  check(!on || !is_inference() || autograd::inference_mode_enabled(),
        "requires_grad_: the tensor of shape {} was created in inference mode; outside of it, use a clone", shape());
  if (on || find_slot(*this) != nullptr) {
    autograd::slot_of(*this).requires_grad = on;
  }
  return *this;
}

bool Tensor::is_leaf() const {
  const autograd::Slot* slot = find_slot(*this);
  return slot == nullptr || slot->node == nullptr;
}

Tensor Tensor::grad() const {
  const autograd::Slot* slot = find_slot(*this);
  return slot == nullptr ? Tensor{} : slot->grad;
}

void Tensor::set_grad(const Tensor& grad) const {
  if (grad.defined()) {
    check(grad.shape() == shape() && grad.dtype() == dtype() && grad.device() == device(),
          "set_grad: expected {} {} on {}, got {} {} on {}", dtype(), shape(), device(), grad.dtype(), grad.shape(),
          grad.device());
    autograd::slot_of(*this).grad = grad.requires_grad() ? grad.detach() : grad;
  } else if (autograd::Slot* slot = find_slot(*this)) {
    slot->grad = {};
  }
}

void Tensor::backward(const Tensor& gradient, BackwardOptions options) const {
  autograd::backward(*this, gradient, options);
}

Tensor Tensor::detach() const {
  const Tensor result = autograd::without_history(*this);
  if (autograd::anomaly_enabled() && (autograd::grad_enabled() || autograd::grad_disabled_by_user())) {
    autograd::trace_detach(*this, result);
  }
  return result;
}

void Tensor::set_data(const Tensor& data) const {
  check(is_leaf(), "set_data: expected a leaf, got the result of an op");
  check(data.shape() == shape(), "set_data: expected shape {}, got {}", shape(), data.shape());
  check(!requires_grad() || is_floating(data.dtype()), "set_data: the tensor requires a gradient, which {} cannot have",
        data.dtype());
  const std::uint32_t next = version() + 1;
  if (autograd::Slot* slot = find_slot(*this)) {
    slot->grad = {};
    slot->accumulator.reset();  // it would check for the old dtype and device
  }
  detail::TensorImpl& own = impl();
  own.storage = data.handle()->storage;
  own.strides = data.strides();
  own.offset = data.handle()->offset;
  own.dtype = data.dtype();
  own.contiguous = data.is_contiguous();
  own.base.reset();
  own.storage->raise_version(next, "set_data");
}

std::shared_ptr<autograd::Node> Tensor::grad_fn() const {
  const autograd::Slot* slot = find_slot(*this);
  return slot == nullptr ? nullptr : slot->node;
}

autograd::HookHandle Tensor::register_hook(std::function<Tensor(const Tensor&)> hook) const {
  check_callable(hook, "register_hook");
  check(requires_grad(), "register_hook: the tensor of shape {} does not require a gradient", shape());
  autograd::Slot& slot = *handle()->slot;
  return slot.node ? slot.node->register_output_hook(slot.output, std::move(hook)) : slot.hooks.add(std::move(hook));
}

autograd::HookHandle Tensor::register_post_accumulate_grad_hook(std::function<void(const Tensor&)> hook) const {
  check_callable(hook, "register_post_accumulate_grad_hook");
  check(requires_grad() && is_leaf(),
        "register_post_accumulate_grad_hook: expected a leaf that requires a gradient, got {} of shape {}",
        is_leaf() ? "one that does not" : "the result of an op", shape());
  // The graph may outlive the leaf; its grad is then unreachable.
  return handle()->slot->after_accumulate.add([leaf = std::weak_ptr(handle()), hook = std::move(hook)] {
    if (auto impl = leaf.lock()) {
      hook(Tensor(std::move(impl)));
    }
  });
}

}  // namespace mica

#include <utility>

#include <mica/autograd/function.h>
#include <mica/core/detail/callable.h>
#include <mica/nn/detail/module_state.h>
#include <mica/nn/module.h>

namespace mica::nn {

namespace {

// The name and class of a module, for messages.
std::string described(const detail::ModuleState& state) {
  const std::string text = autograd::describe(*state.name);
  return text.empty() ? "a module" : text;
}

// Replaces the defined gradients by those that a hook returned.
void replace_gradients(Tensors& gradients, const Tensors& replacements, const std::string& module) {
  if (replacements.empty()) {
    return;
  }
  check(replacements.size() == gradients.size(),
        "register_backward_hook: a hook of {} returned {} gradients for {} inputs", module, replacements.size(),
        gradients.size());
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const Tensor& old = gradients[i];
    const Tensor& replacement = replacements[i];
    if (!old.defined() || !replacement.defined()) {
      continue;
    }
    check(replacement.shape() == old.shape() && replacement.dtype() == old.dtype() &&
              replacement.device() == old.device(),
          "register_backward_hook: a hook of {} replaced a gradient of {} {} on {} by one of {} {} on {}", module,
          old.dtype(), old.shape(), old.device(), replacement.dtype(), replacement.shape(), replacement.device());
    gradients[i] = replacement;
  }
}

// Handles to the same elements, as results of a recorded op.
Tensors same_elements(const Tensors& tensors) {
  Tensors result;
  for (const Tensor& x : tensors) {
    result.push_back(as_strided(x, x.shape(), x.strides(), x.handle()->offset));
  }
  return result;
}

}  // namespace

namespace detail {

// What the backward of one call has seen. Its hooks are called once the gradients of the inputs are complete.
struct HookedCall::Gradients {
  std::string module;
  decltype(ModuleState::backward) hooks;
  std::size_t inputs = 0;               // of the module
  std::vector<std::size_t> of_inputs;   // those that need a gradient: the inputs of Entrance
  std::size_t outputs = 0;              // of the module
  std::vector<std::size_t> of_outputs;  // those that have one: the inputs of Exit
  Tensors grad_outputs;

  void call_hooks(Tensors& grad_inputs) {
    hooks.each([&](const auto& hook) { replace_gradients(grad_inputs, hook(grad_inputs, grad_outputs), module); });
    grad_outputs.clear();
  }
};

// The inputs enter the module: the last op of its backward.
struct HookedCall::Entrance {
  static constexpr bool composed = true;
  std::shared_ptr<Gradients> seen;

  Tensors forward(autograd::Context& ctx, const Tensors& inputs) const {
    ctx.set_materialize_grads(false);
    return same_elements(inputs);
  }
  Tensors backward(autograd::Context&, const Tensors& gradients) const {
    Tensors grad_inputs(seen->inputs);
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      grad_inputs[seen->of_inputs[i]] = gradients[i];
    }
    seen->call_hooks(grad_inputs);
    Tensors result;
    for (const std::size_t i : seen->of_inputs) {
      result.push_back(grad_inputs[i]);
    }
    return result;
  }
};

// The outputs leave the module: the first op of its backward.
struct HookedCall::Exit {
  static constexpr bool composed = true;
  std::shared_ptr<Gradients> seen;

  Tensors forward(autograd::Context& ctx, const Tensors& outputs) const {
    ctx.set_materialize_grads(false);
    return same_elements(outputs);
  }
  Tensors backward(autograd::Context&, const Tensors& gradients) const {
    seen->grad_outputs.assign(seen->outputs, {});
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      seen->grad_outputs[seen->of_outputs[i]] = gradients[i];
    }
    if (seen->of_inputs.empty()) {
      Tensors none(seen->inputs);
      seen->call_hooks(none);
    }
    return gradients;
  }
};

HookedCall::HookedCall(const Module& module, Tensors inputs) : state_(module.state()), inputs_(std::move(inputs)) {
  state_.before.each([this](const auto& hook) {
    const Tensors replacements = hook(inputs_);
    check(replacements.empty() || replacements.size() == inputs_.size(),
          "register_forward_pre_hook: a hook of {} returned {} tensors for {} inputs", described(state_),
          replacements.size(), inputs_.size());
    if (!replacements.empty()) {
      inputs_ = replacements;
    }
  });
  if (state_.backward.empty()) {
    return;
  }
  gradients_ = std::make_shared<Gradients>();
  gradients_->module = described(state_);
  gradients_->hooks = state_.backward;
  gradients_->inputs = inputs_.size();
  Tensors entering;
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    if (inputs_[i].defined() && inputs_[i].requires_grad()) {
      gradients_->of_inputs.push_back(i);
      entering.push_back(inputs_[i]);
    }
  }
  if (!entering.empty()) {
    entering = autograd::apply(Entrance{gradients_}, entering);
    for (std::size_t i = 0; i < entering.size(); ++i) {
      inputs_[gradients_->of_inputs[i]] = entering[i];
    }
  }
}

void HookedCall::end(const std::vector<Tensor*>& outputs) {
  Tensors values;
  for (const Tensor* output : outputs) {
    values.push_back(*output);
  }
  state_.after.each([&](const auto& hook) {
    const Tensors replacements = hook(inputs_, values);
    check(replacements.empty() || replacements.size() == values.size(),
          "register_forward_hook: a hook of {} returned {} tensors for {} outputs", described(state_),
          replacements.size(), values.size());
    if (!replacements.empty()) {
      values = replacements;
    }
  });
  if (gradients_ != nullptr) {
    gradients_->outputs = values.size();
    Tensors leaving;
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (values[i].defined() && values[i].requires_grad()) {
        gradients_->of_outputs.push_back(i);
        leaving.push_back(values[i]);
      }
    }
    if (!leaving.empty()) {
      leaving = autograd::apply(Exit{gradients_}, leaving);
      for (std::size_t i = 0; i < leaving.size(); ++i) {
        values[gradients_->of_outputs[i]] = leaving[i];
      }
    }
  }
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    *outputs[i] = values[i];
  }
}

}  // namespace detail

bool Module::has_hooks() const {
  const detail::ModuleState& own = state();
  return !own.before.empty() || !own.after.empty() || !own.backward.empty();
}

autograd::HookHandle Module::add_pre_hook(std::function<Tensors(const Tensors&)> hook) {
  return state().before.add(std::move(hook));
}

autograd::HookHandle Module::add_forward_hook(std::function<Tensors(const Tensors&, const Tensors&)> hook) {
  return state().after.add(std::move(hook));
}

autograd::HookHandle Module::add_backward_hook(std::function<Tensors(const Tensors&, const Tensors&)> hook) {
  return state().backward.add(std::move(hook));
}

}  // namespace mica::nn

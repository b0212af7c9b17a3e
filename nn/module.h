#pragma once

#include <array>
#include <concepts>
#include <functional>
#include <memory>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include <mica/autograd/detail/module_name.h>
#include <mica/autograd/hooks.h>
#include <mica/core/state_dict.h>
#include <mica/core/tensor.h>

namespace mica::nn {

/// Tensors with their names, in the order of registration.
using NamedTensors = std::vector<std::pair<std::string, Tensor>>;

namespace detail {
struct ModuleState;  // a module's registry, shared by the module (even after a move) and its parent
class Cloning;
class HookedCall;
}  // namespace detail

class Module;

/// The differences that a load with strict = false has accepted.
struct LoadDifferences {
  std::vector<std::string> missing;     ///< parameters and buffers without a value
  std::vector<std::string> unexpected;  ///< values that the model does not have
};

/// A module and its name: see Module::named_modules().
struct NamedModule {
  std::string name;
  Module* module;
  const std::type_info* type;  ///< the module's class; null for an outermost module that has not been called yet
};

/// The base class of everything that has parameters. A module is a struct whose members register themselves as they are
/// initialized, and whose `operator() const` is the computation:
///
///     struct Mlp : nn::Module {
///       nn::Linear fc1 = child("fc1", nn::Linear{784, 256});
///       nn::Linear fc2 = child("fc2", nn::Linear{256, 10});
///       Tensor scale = param("scale", ones({10}));
///       Tensor operator()(const Tensor& x) const { return fc2(gelu(fc1(x))) * scale; }
///     };
///
/// Names are joined by dots as PyTorch's are: "fc1.weight".
///
/// Modules are values that can be moved. The registry holds handles, not addresses, so it remains valid when a module
/// is moved. nn::clone() (nn/clone.h) copies a module; any other copy throws.
///
/// There is no assignment: the parent's registry would still hold the old module. For the same reason, change a
/// parameter by writing to its tensor (load_state_dict, nn::init), not by assigning another tensor to the member.
///
/// Errors and graph pictures name the module in which an op ran, and hooks see what a module takes and returns. mica's
/// own modules provide this; in your modules, use nn::call() in operator(), or a Scope for the name alone.
class Module {
 public:
  Module();
  Module(Module&& other) noexcept;
  ~Module();
  Module(const Module& other);  ///< for nn::clone(); throws elsewhere
  Module& operator=(Module&&) = delete;
  Module& operator=(const Module&) = delete;

  /// Turns training mode, and with it dropout, on or off here and in all modules below. New modules are training.
  void train(bool on = true);
  void eval() { train(false); }
  /// The module's own mode; false on a thread that has an Evaluation guard.
  bool is_training() const;

  /// Moves all parameters and buffers, with their gradients, to a device. All handles to them (in members, optimizers,
  /// tied modules) refer to the moved data. If the device runs out of memory, nothing changes.
  void to(Device device);
  /// Converts all floating parameters and buffers, with their gradients. Fixed buffers, such as the scales of weights
  /// from a quantized file, keep their dtype, and so their values.
  void to(DType dtype);
  void to(Device device, DType dtype);

  /// The module's own parameters first, then those of the children in the order of registration. A tensor registered
  /// under several names appears once, under the first.
  Tensors parameters() const;
  NamedTensors named_parameters() const;
  NamedTensors named_buffers() const;
  /// This module, named "", and all below it, parents first. The addresses are valid until a module is moved.
  std::vector<NamedModule> named_modules();

  /// Handles to all parameters and buffers, without history. As in PyTorch, a tensor registered under several names
  /// appears under each.
  StateDict state_dict() const;

  /// Copies the tensors of `state` into parameters and buffers, converting dtype and device. Throws one Error that
  /// lists missing and unexpected names and different shapes, without writing anything; with `strict` false only shapes
  /// must match, and the missing and unexpected names are returned, in the order of state_dict(). A tied tensor needs
  /// only one of its names; if several are given, their values must be equal. Values may be views of the module's own
  /// tensors: all are read before any is written.
  ///
  /// With `assign`, nothing is copied: parameters and buffers refer to the elements of the values afterwards, with
  /// their dtype and device, and lose their gradients. Only a value that is not contiguous is copied. An integer value
  /// for a floating tensor is also an error.
  LoadDifferences load_state_dict(const StateDict& state, bool strict = true, bool assign = false);

  /// Removes the gradients of all parameters.
  void zero_grad();

  // Hooks run in the order of registration whenever the module is called, with its tensor arguments (an absent one is
  // undefined) and its results: of a pair of a residual and a branch, both. They run on the calling thread, inside the
  // module's scope. A hook returns nothing, or replacements: a Tensor if there is one value, or Tensors, of which an
  // empty list keeps the values. Replacements must match in number and, for gradients, in shape, dtype and device. In a
  // CUDA graph, hooks run once, at its capture; infer's LlamaDecoder calls kernels instead of modules and runs none.
  // Copies made by nn::clone() have no hooks. A module without hooks does not pay for them.

  /// Calls `hook(const Tensors& inputs)` before the module computes.
  template <class F>
  autograd::HookHandle register_forward_pre_hook(F hook) {
    return add_pre_hook([hook = std::move(hook)](const Tensors& inputs) { return replacements(hook, inputs); });
  }
  /// Calls `hook(const Tensors& inputs, const Tensors& outputs)` after the module has computed.
  template <class F>
  autograd::HookHandle register_forward_hook(F hook) {
    return add_forward_hook([hook = std::move(hook)](const Tensors& inputs, const Tensors& outputs) {
      return replacements(hook, inputs, outputs);
    });
  }
  /// Calls `hook(const Tensors& grad_inputs, const Tensors& grad_outputs)` in backward, once the gradients of the
  /// inputs of a call are complete. Gradients that are not needed or did not arrive are undefined. Results replace the
  /// gradients of the inputs.
  template <class F>
  autograd::HookHandle register_backward_hook(F hook) {
    return add_backward_hook([hook = std::move(hook)](const Tensors& grad_inputs, const Tensors& grad_outputs) {
      return replacements(hook, grad_inputs, grad_outputs);
    });
  }
  bool has_hooks() const;

 protected:
  /// Registers a floating tensor to be trained and returns it. Names are unique in a module and contain no dot.
  Tensor param(const std::string& name, const Tensor& value);
  /// Registers a tensor that is stored and moved with the module, but not trained.
  Tensor buffer(const std::string& name, const Tensor& value);
  /// Like buffer(), for a floating tensor that to(dtype) does not convert.
  Tensor fixed_buffer(const std::string& name, const Tensor& value);
  /// Removes the parameter or buffer registered under this name.
  void forget(const std::string& name);
  /// Registers a module below this one and returns it.
  template <std::derived_from<Module> M>
  M child(const std::string& name, M&& module) {
    add_child(name, module, typeid(M));
    return std::forward<M>(module);
  }

 private:
  friend class Scope;
  friend class detail::Cloning;
  friend class detail::HookedCall;
  template <std::derived_from<Module> M>
  friend class ModuleReference;

  template <class F, class... In>
  static Tensors replacements(const F& hook, const In&... values) {
    using Result = decltype(hook(values...));
    if constexpr (std::is_void_v<Result>) {
      hook(values...);
      return {};
    } else if constexpr (std::same_as<Result, Tensor>) {
      const Tensor result = hook(values...);
      return result.defined() ? Tensors{result} : Tensors{};
    } else {
      return hook(values...);
    }
  }
  autograd::HookHandle add_pre_hook(std::function<Tensors(const Tensors&)> hook);
  autograd::HookHandle add_forward_hook(std::function<Tensors(const Tensors&, const Tensors&)> hook);
  autograd::HookHandle add_backward_hook(std::function<Tensors(const Tensors&, const Tensors&)> hook);

  void add_child(const std::string& name, const Module& module, const std::type_info& type);
  const std::shared_ptr<autograd::ModuleName>& name(const std::type_info& type) const;
  detail::ModuleState& state() const;
  static const Module& find(const std::weak_ptr<detail::ModuleState>& state);

  std::shared_ptr<detail::ModuleState> state_;
};

/// A reference to a module that stays valid when the module is moved. Does not own it.
template <std::derived_from<Module> M>
class ModuleReference {
 public:
  explicit ModuleReference(const M& module) : state_(static_cast<const Module&>(module).state_) {}
  /// Throws if the module was destroyed.
  const M& get() const { return static_cast<const M&>(Module::find(state_)); }

 private:
  std::weak_ptr<detail::ModuleState> state_;
};

/// Attributes the ops of this thread to `module` until the end of scope.
class Scope {
 public:
  template <std::derived_from<Module> M>
  explicit Scope(const M& module) : current_(static_cast<const Module&>(module).name(typeid(M))) {}

 private:
  autograd::CurrentModule current_;
};

namespace detail {

/// A call of a module that has hooks.
class HookedCall {
 public:
  /// Calls the hooks before the module.
  HookedCall(const Module& module, Tensors inputs);
  const Tensors& inputs() const { return inputs_; }
  /// Calls the hooks after it, which may replace outputs.
  void end(const std::vector<Tensor*>& outputs);

 private:
  struct Gradients;
  struct Entrance;
  struct Exit;

  ModuleState& state_;
  Tensors inputs_;
  std::shared_ptr<Gradients> gradients_;  // null without backward hooks
};

/// The tensors of a module's result: a Tensor, a list or an array of them, or a struct of two or three.
template <class R>
std::vector<Tensor*> tensors_of(R& result) {
  if constexpr (std::same_as<R, Tensor>) {
    return {&result};
  } else if constexpr (requires { result.begin(); }) {
    std::vector<Tensor*> tensors;
    tensors.reserve(result.size());
    for (Tensor& tensor : result) {
      tensors.push_back(&tensor);
    }
    return tensors;
  } else if constexpr (requires { R{Tensor{}, Tensor{}, Tensor{}}; }) {
    auto& [a, b, c] = result;
    return {&a, &b, &c};
  } else {
    auto& [a, b] = result;
    return {&a, &b};
  }
}

template <class M, class F, class... In>
auto call_with(const M& module, const F& f, const In&... inputs) {
  const Scope scope(module);
  if (!module.has_hooks()) [[likely]] {
    return f(inputs...);
  }
  HookedCall hooked(module, {inputs...});
  auto result = [&]<std::size_t... I>(std::index_sequence<I...>) { return f(hooked.inputs()[I]...); }
  (std::index_sequence_for<In...>{});
  hooked.end(tensors_of(result));
  return result;
}

}  // namespace detail

/// Computes f(x, …) as a call of `module`: in its Scope, with its hooks. Meant for operator():
///
///     Tensor operator()(const Tensor& x) const {
///       return nn::call(*this, x, [&](const Tensor& x) { return fc2(gelu(fc1(x))); });
///     }
///
/// f returns a Tensor, a list or an array of them, or a struct of two or three.
template <std::derived_from<Module> M, class F>
auto call(const M& module, const Tensor& x, const F& f) {
  return detail::call_with(module, f, x);
}
template <std::derived_from<Module> M, class F>
auto call(const M& module, const Tensor& x, const Tensor& y, const F& f) {
  return detail::call_with(module, f, x, y);
}
template <std::derived_from<Module> M, class F>
auto call(const M& module, const Tensor& x, const Tensor& y, const Tensor& z, const F& f) {
  return detail::call_with(module, f, x, y, z);
}
template <std::derived_from<Module> M, class F>
auto call(const M& module, const Tensor& x, const Tensor& y, const Tensor& z, const Tensor& w, const F& f) {
  return detail::call_with(module, f, x, y, z, w);
}

}  // namespace mica::nn

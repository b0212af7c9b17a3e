#include <optional>
#include <unordered_map>
#include <utility>

#include <mica/autograd/detail/diagnostics.h>
#include <mica/core/copy.h>
#include <mica/core/detail/handle_copies.h>
#include <mica/nn/clone.h>
#include <mica/nn/detail/module_state.h>

namespace mica::nn {

namespace detail {

thread_local constinit Cloning::Copies* Cloning::current_ = nullptr;

// The copies of states and tensors, by their original.
struct Cloning::Copies {
  std::unordered_map<const ModuleState*, std::shared_ptr<ModuleState>> states;
  mica::detail::HandleCopies::Map tensors;
  Copies* outer = nullptr;
  std::optional<mica::detail::HandleCopies> handles;

  Tensor copy_of(const Tensor& x) {
    const auto [at, is_new] = tensors.try_emplace(x.handle().get());
    if (is_new) {
      const Tensor copy = empty(x.shape(), x.dtype(), x.device());
      copy_into(copy, x);
      if (x.requires_grad()) {
        copy.requires_grad_();
      }
      at->second = copy.handle();
    }
    return Tensor(at->second);
  }

  std::shared_ptr<ModuleState> copy_of(const ModuleState& state) {
    auto copy = std::make_shared<ModuleState>(state);
    copy->module = nullptr;
    copy->parameters.clear();
    copy->buffers.clear();
    copy->children.clear();
    copy->before = {};
    copy->after = {};
    copy->backward = {};
    copy->name = std::make_shared<autograd::ModuleName>();
    copy->name->name = state.name->name;
    copy->name->type.store(state.name->type.load(std::memory_order_relaxed), std::memory_order_relaxed);
    for (const auto& [name, tensor] : state.parameters) {
      copy->parameters.emplace_back(name, copy_of(tensor));
      autograd::Notes& notes = autograd::notes_of(copy->parameters.back().second);
      if (notes.name.empty()) {
        notes.name = name;
        notes.module = copy->name;
      }
    }
    for (const auto& [name, tensor] : state.buffers) {
      copy->buffers.emplace_back(name, copy_of(tensor));
    }
    for (const auto& [name, child] : state.children) {
      copy->children.emplace_back(name, copy_of(*child));
      copy->children.back().second->name->parent = copy->name;
    }
    states.emplace(&state, copy);
    return copy;
  }
};

Cloning::Cloning(const Module& module) : copies_(std::make_unique<Copies>()) {
  {
    const mica::detail::HandleCopies none(nullptr);  // if a copy constructor clones
    copies_->copy_of(module.state())->name->name.clear();
  }
  copies_->outer = std::exchange(current_, copies_.get());
  copies_->handles.emplace(&copies_->tensors);
}

Cloning::~Cloning() { current_ = copies_->outer; }

std::shared_ptr<ModuleState> Cloning::state_for_copy_of(const Module& module) {
  check(current_ != nullptr, "module: only nn::clone(module) copies a module; otherwise move it");
  const auto at = current_->states.find(&module.state());
  if (at != current_->states.end()) {
    return at->second;
  }
  const mica::detail::HandleCopies none(nullptr);  // a module that was not registered with the one that has it
  return current_->copy_of(module.state());
}

}  // namespace detail

Module::Module(const Module& other) : state_(detail::Cloning::state_for_copy_of(other)) { state_->module = this; }

}  // namespace mica::nn

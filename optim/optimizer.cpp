#include <cmath>
#include <set>
#include <unordered_set>

#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/optim/optimizer.h>

namespace mica::optim {

namespace {

Tensor copied(const Tensor& x, DType dtype, Device device) {
  const Tensor result = empty(x.shape(), dtype, device);
  copy_into(result, x);
  return result;
}

}  // namespace

void check_lr(const char* optimizer, double lr) {
  check(lr >= 0 && std::isfinite(lr), "{}: expected lr >= 0, got {}", optimizer, lr);
}

Optimizer::Optimizer(const char* name, const std::vector<Tensors>& groups, std::vector<std::string> state_names)
    : name_(name), group_count_(groups.size()), state_names_(std::move(state_names)) {
  std::unordered_set<const void*> seen;
  for (std::size_t group = 0; group < groups.size(); ++group) {
    for (const Tensor& parameter : groups[group]) {
      check(parameter.is_leaf() && parameter.requires_grad(),
            "{}: expected parameters to be leaves that require a gradient, got one of shape {} that is not", name_,
            parameter.shape());
      check(seen.insert(parameter.handle().get()).second, "{}: a parameter of shape {} was given twice", name_,
            parameter.shape());
      slots_.push_back({.parameter = parameter, .group = group, .step = 0, .states = {}});
    }
  }
  check(!slots_.empty(), "{}: expected at least one parameter", name_);
}

void Optimizer::step() {
  for (const Slot& slot : slots_) {
    const Tensor& x = slot.parameter;
    if (const Tensor grad = x.grad(); grad.defined()) {
      check(grad.dtype() == x.dtype() && grad.device() == x.device(),
            "{}: expected the gradient of a {} parameter on {}, got {} on {}: was the parameter moved between forward "
            "and backward?",
            name_, x.dtype(), x.device(), grad.dtype(), grad.device());
    }
  }
  for (Slot& slot : slots_) {
    const Tensor& x = slot.parameter;
    const Tensor grad = x.grad();
    if (!grad.defined()) {
      continue;
    }
    const DType dtype = accumulate_dtype(x.dtype());
    if (slot.states.empty()) {
      for (std::size_t i = 0; i < state_names_.size(); ++i) {
        slot.states.push_back(zeros(x.shape(), dtype, x.device()));
      }
    }
    for (Tensor& state : slot.states) {
      if (state.dtype() != dtype || state.device() != x.device()) {
        state = copied(state, dtype, x.device());
      }
    }
    ++slot.step;
    const Tensor row_major = contiguous_data(x);
    update(row_major, contiguous_data(grad), slot.states, slot.step, slot.group);
    if (!row_major.is_same(x)) {
      copy_into(x, row_major);
    }
    x.bump_version("an optimizer's step");
  }
}

void Optimizer::zero_grad() {
  for (const Slot& slot : slots_) {
    slot.parameter.set_grad({});
  }
}

void Optimizer::set_lr(double lr) {
  for (std::size_t group = 0; group < group_count_; ++group) {
    set_lr(group, lr);
  }
}

Tensors Optimizer::parameters() const {
  Tensors result;
  for (const Slot& slot : slots_) {
    result.push_back(slot.parameter);
  }
  return result;
}

StateDict Optimizer::state_dict() const {
  StateDict result;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    if (slot.step == 0) {
      continue;
    }
    result.emplace(fmt::format("state.{}.step", i), from_data({slot.step}, Shape{}));
    for (std::size_t k = 0; k < slot.states.size(); ++k) {
      result.emplace(fmt::format("state.{}.{}", i, state_names_[k]), slot.states[k]);
    }
  }
  return result;
}

void Optimizer::load_state_dict(const StateDict& state) {
  std::vector<Slot> loaded = slots_;
  std::set<std::string> known;
  const auto find = [&](std::size_t i, const std::string& what, const Shape& shape) {
    const std::string name = fmt::format("state.{}.{}", i, what);
    known.insert(name);
    const auto at = state.find(name);
    check(at == state.end() || (at->second.defined() && at->second.shape() == shape),
          "{}: load_state_dict: expected \"{}\" of shape {}, got {}", name_, name, shape,
          at == state.end() || !at->second.defined() ? "an undefined tensor" : to_string(at->second.shape()));
    return at == state.end() ? Tensor{} : at->second;
  };
  for (std::size_t i = 0; i < loaded.size(); ++i) {
    Slot& slot = loaded[i];
    const Tensor step = find(i, "step", {});
    slot.step = step.defined() ? static_cast<std::int64_t>(step.item()) : 0;
    slot.states.clear();
    check(slot.step >= 0, "{}: load_state_dict: \"state.{}.step\" is {}", name_, i, slot.step);
    for (const std::string& name : state_names_) {
      const Tensor value = find(i, name, slot.parameter.shape());
      check(value.defined() == step.defined(),
            "{}: load_state_dict: of \"state.{}.step\" and \"state.{}.{}\" one is "
            "missing",
            name_, i, i, name);
      if (value.defined()) {
        slot.states.push_back(copied(value, accumulate_dtype(slot.parameter.dtype()), slot.parameter.device()));
      }
    }
  }
  for (const auto& [name, tensor] : state) {
    check(known.contains(name), "{}: load_state_dict: \"{}\" is unexpected: there are {} parameters", name_, name,
          loaded.size());
  }
  slots_ = std::move(loaded);
}

}  // namespace mica::optim

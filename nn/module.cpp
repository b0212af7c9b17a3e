#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include <mica/autograd/detail/diagnostics.h>
#include <mica/autograd/detail/slot.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/detail/overlap.h>
#include <mica/core/progress.h>
#include <mica/nn/detail/module_state.h>
#include <mica/nn/evaluation.h>
#include <mica/nn/module.h>

namespace mica::nn {

namespace {

using detail::ModuleState;

// Calls f(state, prefix) for a module and all modules below it, parents first.
template <class F>
void visit(ModuleState& state, const std::string& prefix, const F& f) {
  f(state, prefix);
  for (const auto& [name, child] : state.children) {
    visit(*child, prefix + name + ".", f);
  }
}

void check_name(const ModuleState& state, const std::string& name) {
  check(!name.empty() && name.find('.') == std::string::npos,
        "module: expected a name that is not empty and has no dot, got \"{}\"", name);
  const auto has = [&name](const auto& entries) {
    for (const auto& entry : entries) {
      if (entry.first == name) {
        return true;
      }
    }
    return false;
  };
  check(!has(state.parameters) && !has(state.buffers) && !has(state.children),
        "module: the name \"{}\" is already registered", name);
}

// Each tensor once, under its first name.
NamedTensors unique(ModuleState& root, NamedTensors ModuleState::*list) {
  NamedTensors result;
  std::unordered_set<const void*> seen;
  visit(root, "", [&](const ModuleState& state, const std::string& prefix) {
    for (const auto& [name, tensor] : state.*list) {
      if (seen.insert(tensor.handle().get()).second) {
        result.emplace_back(prefix + name, tensor);
      }
    }
  });
  return result;
}

// All parameters and buffers, under each of their names.
NamedTensors entries_of(ModuleState& root) {
  NamedTensors result;
  visit(root, "", [&](const ModuleState& state, const std::string& prefix) {
    for (const NamedTensors* list : {&state.parameters, &state.buffers}) {
      for (const auto& [name, tensor] : *list) {
        result.emplace_back(prefix + name, tensor);
      }
    }
  });
  return result;
}

Tensor converted(const Tensor& x, Device device, DType dtype) {
  const Tensor result = empty(x.shape(), dtype, device);
  copy_into(result, x);
  return result;
}

std::unordered_set<const void*> fixed_tensors(ModuleState& root) {
  std::unordered_set<const void*> result;
  visit(root, "", [&](const ModuleState& state, const std::string&) {
    for (const auto& [name, tensor] : state.buffers) {
      if (state.fixed.contains(name)) {
        result.insert(tensor.handle().get());
      }
    }
  });
  return result;
}

void convert_all(ModuleState& root, std::optional<Device> device, std::optional<DType> dtype) {
  struct Change {
    Tensor tensor;
    Device device;
    DType dtype;
    Tensor data{}, grad{};
  };
  std::vector<Change> changes;
  std::int64_t bytes = 0;
  bool moves = false;
  const std::unordered_set<const void*> fixed = fixed_tensors(root);
  for (auto list : {&ModuleState::parameters, &ModuleState::buffers}) {
    for (const auto& [name, tensor] : unique(root, list)) {
      const Device to_device = device.value_or(tensor.device());
      const bool converts = is_floating(tensor.dtype()) && !fixed.contains(tensor.handle().get());
      const DType to_dtype = converts ? dtype.value_or(tensor.dtype()) : tensor.dtype();
      if (to_device != tensor.device() || to_dtype != tensor.dtype()) {
        changes.push_back({.tensor = tensor, .device = to_device, .dtype = to_dtype});
        bytes += static_cast<std::int64_t>(tensor.bytes());
        moves = moves || to_device != tensor.device();
      }
    }
  }
  ProgressTask progress(moves ? fmt::format("moving the model to {}", *device) : "converting the model", bytes);
  for (Change& change : changes) {
    const Tensor grad = change.tensor.grad();
    change.data = converted(change.tensor, change.device, change.dtype);
    change.grad = grad.defined() ? converted(grad, change.device, change.dtype) : Tensor{};
    progress.advance(static_cast<std::int64_t>(change.tensor.bytes()));
  }
  for (const Change& change : changes) {
    change.tensor.set_data(change.data);
    change.tensor.set_grad(change.grad);
  }
}

bool same_place(const Tensor& a, const Tensor& b) {
  return a.handle()->storage == b.handle()->storage && a.handle()->offset == b.handle()->offset &&
         a.shape() == b.shape() && a.strides() == b.strides() && a.dtype() == b.dtype();
}

bool same_values(const Tensor& a, const Tensor& b) {
  if (same_place(a, b)) {
    return true;
  }
  const std::vector<double> left = to_vector<double>(a);
  const std::vector<double> right = to_vector<double>(b);
  return std::equal(left.begin(), left.end(), right.begin(), right.end(),
                    [](double x, double y) { return x == y || (std::isnan(x) && std::isnan(y)); });
}

void append(std::string& list, const std::string& item) { list += list.empty() ? item : ", " + item; }

}  // namespace

Module::Module() : state_(std::make_shared<detail::ModuleState>()) { state_->module = this; }

Module::Module(Module&& other) noexcept : state_(std::move(other.state_)) {
  if (state_ != nullptr) {
    state_->module = this;
  }
}

Module::~Module() {
  if (state_ != nullptr) {
    state_->module = nullptr;
  }
}

const Module& Module::find(const std::weak_ptr<detail::ModuleState>& state) {
  const auto alive = state.lock();
  check(alive != nullptr && alive->module != nullptr, "module: a handle to a destroyed module was used");
  return *alive->module;
}

detail::ModuleState& Module::state() const {
  check(state_ != nullptr, "module: used after it was moved from");
  return *state_;
}

Tensor Module::param(const std::string& name, const Tensor& value) {
  check_name(state(), name);
  value.requires_grad_();
  autograd::Notes& notes = autograd::notes_of(value);
  if (notes.name.empty()) {  // a tied tensor keeps its first name
    notes.name = name;
    notes.module = state().name;
  }
  state().parameters.emplace_back(name, value);
  return value;
}

Tensor Module::buffer(const std::string& name, const Tensor& value) {
  check_name(state(), name);
  check(value.defined() && !value.requires_grad(), "module: expected buffer \"{}\" to be a tensor without gradient",
        name);
  state().buffers.emplace_back(name, value);
  return value;
}

Tensor Module::fixed_buffer(const std::string& name, const Tensor& value) {
  buffer(name, value);
  state().fixed.insert(name);
  return value;
}

void Module::forget(const std::string& name) {
  const auto has_name = [&name](const auto& entry) { return entry.first == name; };
  const std::size_t removed = std::erase_if(state().parameters, has_name) + std::erase_if(state().buffers, has_name);
  check(removed == 1, "module: there is no parameter or buffer \"{}\"", name);
  state().fixed.erase(name);
}

void Module::add_child(const std::string& name, const Module& module, const std::type_info& type) {
  check_name(state(), name);
  autograd::ModuleName& own = *module.state().name;
  own.name = name;
  own.parent = state().name;
  own.type.store(&type, std::memory_order_relaxed);
  state().children.emplace_back(name, module.state_);
}

const std::shared_ptr<autograd::ModuleName>& Module::name(const std::type_info& type) const {
  state().name->type.store(&type, std::memory_order_relaxed);  // an outermost module has no parent that could set it
  return state().name;
}

void Module::train(bool on) {
  visit(state(), "", [on](ModuleState& state, const std::string&) { state.training = on; });
}

bool Module::is_training() const { return state().training && !Evaluation::is_on(); }

void Module::to(Device device) { convert_all(state(), device, std::nullopt); }

void Module::to(DType dtype) {
  check(is_floating(dtype), "module: expected a floating dtype to convert to, got {}", dtype);
  convert_all(state(), std::nullopt, dtype);
}

void Module::to(Device device, DType dtype) {
  check(is_floating(dtype), "module: expected a floating dtype to convert to, got {}", dtype);
  convert_all(state(), device, dtype);
}

NamedTensors Module::named_parameters() const { return unique(state(), &ModuleState::parameters); }

NamedTensors Module::named_buffers() const { return unique(state(), &ModuleState::buffers); }

std::vector<NamedModule> Module::named_modules() {
  std::vector<NamedModule> result;
  visit(state(), "", [&](const ModuleState& state, const std::string& prefix) {
    check(state.module != nullptr, "module: {} was destroyed", prefix);
    result.push_back({.name = prefix.substr(0, prefix.empty() ? 0 : prefix.size() - 1),
                      .module = state.module,
                      .type = state.name->type.load(std::memory_order_relaxed)});
  });
  return result;
}

Tensors Module::parameters() const {
  Tensors result;
  for (auto& [name, tensor] : named_parameters()) {
    result.push_back(tensor);
  }
  return result;
}

StateDict Module::state_dict() const {
  StateDict result;
  for (const auto& [name, tensor] : entries_of(state())) {
    result.emplace(name, tensor.detach());
  }
  return result;
}

namespace {

// The values to load: by tensor, the name and the value.
using GivenValues = std::unordered_map<const void*, std::pair<std::string, Tensor>>;

// Entries that cannot be loaded, as lists of names.
struct UnusableEntries {
  std::string misshapen, not_floating, differing;
};

GivenValues given_values(const NamedTensors& own, const StateDict& state_dict, bool assign, UnusableEntries& unusable) {
  GivenValues given;
  for (const auto& [name, tensor] : own) {
    const auto at = state_dict.find(name);
    if (at == state_dict.end()) {
      continue;
    }
    const Tensor& value = at->second;
    check(value.defined(), "load_state_dict: \"{}\" is an undefined tensor", name);
    if (value.shape() != tensor.shape()) {
      append(unusable.misshapen, fmt::format("{} (expected {}, got {})", name, tensor.shape(), value.shape()));
      continue;
    }
    if (assign && is_floating(tensor.dtype()) && !is_floating(value.dtype())) {
      append(unusable.not_floating, fmt::format("{} ({})", name, value.dtype()));
      continue;
    }
    const auto [first, is_new] = given.try_emplace(tensor.handle().get(), name, value);
    if (!is_new && !same_values(first->second.second, value)) {
      append(unusable.differing, fmt::format("{} and {}", first->second.first, name));
    }
  }
  return given;
}

LoadDifferences differences_of(const NamedTensors& own, const StateDict& state_dict, const GivenValues& given) {
  LoadDifferences differences;
  std::unordered_set<std::string> names;
  for (const auto& [name, tensor] : own) {
    names.insert(name);
    if (!state_dict.contains(name) && !given.contains(tensor.handle().get())) {
      differences.missing.push_back(name);
    }
  }
  for (const auto& [name, tensor] : state_dict) {
    if (!names.contains(name)) {
      differences.unexpected.push_back(name);
    }
  }
  return differences;
}

// Throws if anything is wrong, before anything is written.
void check_loadable(const LoadDifferences& differences, const UnusableEntries& unusable, bool strict) {
  std::string problems;
  const auto report = [&problems](const char* what, const std::string& list) {
    if (!list.empty()) {
      problems += fmt::format("{}{}: {}", problems.empty() ? "" : "; ", what, list);
    }
  };
  if (strict) {
    report("missing", fmt::format("{}", fmt::join(differences.missing, ", ")));
    report("unexpected", fmt::format("{}", fmt::join(differences.unexpected, ", ")));
  }
  report("shape mismatch", unusable.misshapen);
  report("expected a floating dtype", unusable.not_floating);
  report("shared tensors with different values", unusable.differing);
  check(problems.empty(), "load_state_dict: {}", problems);
}

void assign_values(const NamedTensors& own, GivenValues& given, ProgressTask& progress) {
  for (auto& [key, value] : given) {
    value.second = contiguous_data(value.second);
    progress.advance(static_cast<std::int64_t>(value.second.bytes()));
  }
  for (const auto& [name, tensor] : own) {
    if (const auto at = given.find(tensor.handle().get()); at != given.end()) {
      tensor.set_data(at->second.second);
    }
  }
}

void copy_values(const NamedTensors& own, GivenValues& given, ProgressTask& progress) {
  // A value may be a view of a parameter or buffer that is written before the value is read.
  for (auto& [key, value] : given) {
    Tensor& source = value.second;
    const bool is_written = std::any_of(own.begin(), own.end(), [&, target = key](const auto& entry) {
      const Tensor& written = entry.second;
      const bool onto_itself = written.handle().get() == target && same_place(written, source);
      return may_overlap(written, source) && !onto_itself;
    });
    if (is_written) {
      source = converted(source, source.device(), source.dtype());
    }
  }
  for (const auto& [name, tensor] : own) {
    if (const auto at = given.find(tensor.handle().get()); at != given.end()) {
      if (!same_place(tensor, at->second.second)) {
        copy_into(tensor, at->second.second);
      }
      progress.advance(static_cast<std::int64_t>(at->second.second.bytes()));
      tensor.bump_version("load_state_dict");
      given.erase(at);
    }
  }
}

}  // namespace

LoadDifferences Module::load_state_dict(const StateDict& state_dict, bool strict, bool assign) {
  const NamedTensors own = entries_of(state());
  UnusableEntries unusable;
  GivenValues given = given_values(own, state_dict, assign, unusable);
  LoadDifferences differences = differences_of(own, state_dict, given);
  check_loadable(differences, unusable, strict);
  std::int64_t bytes = 0;
  for (const auto& [key, value] : given) {
    bytes += static_cast<std::int64_t>(value.second.bytes());
  }
  ProgressTask progress("loading the weights", bytes);
  if (assign) {
    assign_values(own, given, progress);
  } else {
    copy_values(own, given, progress);
  }
  return differences;
}

void Module::zero_grad() {
  for (const auto& [name, tensor] : named_parameters()) {
    tensor.set_grad({});
  }
}

}  // namespace mica::nn

#include <cmath>
#include <limits>
#include <set>
#include <unordered_set>

#include <mica/autograd/grad_mode.h>
#include <mica/core/capture.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/detail/memory.h>
#include <mica/core/detail/overlap.h>
#include <mica/core/dispatch.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/elementwise/where.h>
#include <mica/optim/detail/grad_norm.h>
#include <mica/optim/detail/step_kernels.h>
#include <mica/optim/detail/writers.h>
#include <mica/optim/grad_scaler.h>
#include <mica/optim/optimizer.h>

namespace mica::optim {

namespace {

Tensor copied(const Tensor& x, DType dtype, Device device) {
  const Tensor result = empty(x.shape(), dtype, device);
  copy_into(result, x);
  return result;
}

// The number of steps in a state dict, exactly, whatever its dtype.
std::int64_t step_count(const char* optimizer, const std::string& name, const Tensor& step) {
  constexpr std::int64_t kMax = std::int64_t{1} << 53;  // the bias corrections use it as an exponent, in double
  std::int64_t count = -1;
  if (step.dtype() == int64) {
    count = to_vector<std::int64_t>(step)[0];
  } else if (const double value = step.item(); value >= 0 && value <= kMax && value == std::trunc(value)) {
    count = static_cast<std::int64_t>(value);
  }
  check(count >= 0 && count <= kMax, "{}: load_state_dict: expected \"{}\" to be a whole number from 0 to 2^53, got {}",
        optimizer, name, step.dtype() == int64 ? fmt::format("{}", count) : fmt::format("{}", step.item()));
  return count;
}

bool is_16_bit(DType dtype) { return size_of(dtype) == 2; }

}  // namespace

struct Optimizer::ParameterState {
  Tensor parameter;
  std::size_t group = 0;
  Tensors states;
  Tensor master;  // float32; undefined if there is none
  // The parameter after the last step, to detect other writes to it.
  const Storage* written = nullptr;
  std::uint32_t version = 0;
  // The step count: kept on `counted_on` if that device has counts, else here.
  Device counted_on = Device::cpu();
  mutable std::int64_t step = 0;
};

/// An optimizer's data on one device.
struct Optimizer::OnDevice {
  Device device;
  Tensor steps;    // (parameters) int64
  Tensor scalars;  // (groups, scalars of a group) float64
};

/// A step's work on one device.
struct Optimizer::Work : DeviceGradients {
  Tensors parameters{};
  Tensors keep{};                                   // all tensors that the list points to
  std::vector<std::pair<Tensor, Tensor>> copies{};  // (strided parameter, row-major copy that is updated)
};

void check_lr(const char* optimizer, double lr) {
  check(lr >= 0 && std::isfinite(lr), "{}: expected lr >= 0, got {}", optimizer, lr);
}

void check_betas(const char* optimizer, const std::array<double, 2>& betas) {
  for (const double beta : betas) {
    check(beta >= 0 && beta < 1, "{}: expected betas in [0, 1), got {} and {}", optimizer, betas[0], betas[1]);
  }
}

void check_weight_decay(const char* optimizer, double weight_decay) {
  check(weight_decay >= 0 && std::isfinite(weight_decay), "{}: expected weight_decay >= 0, got {}", optimizer,
        weight_decay);
}

Optimizer::Optimizer(const char* name, const std::vector<GroupSpec>& groups)
    : name_(name), scalars_(std::make_shared<std::vector<double>>()), scalars_of_group_(0) {
  std::unordered_set<const void*> seen;
  for (std::size_t group = 0; group < groups.size(); ++group) {
    for (const Tensor& parameter : groups[group].parameters) {
      check(parameter.is_leaf() && parameter.requires_grad(),
            "{}: expected parameters to be leaves that require a gradient, got one of shape {} that is not", name_,
            parameter.shape());
      check(seen.insert(parameter.handle().get()).second, "{}: a parameter of shape {} was given twice", name_,
            parameter.shape());
      ParameterState own;
      own.parameter = parameter;
      own.group = group;
      states_.push_back(own);
    }
    groups_.push_back({.state_names = groups[group].state_names, .master_weights = groups[group].master_weights});
    scalars_->insert(scalars_->end(), groups[group].scalars.begin(), groups[group].scalars.end());
    scalars_of_group_ = groups[group].scalars.size();
  }
  check(!states_.empty(), "{}: expected at least one parameter", name_);
  if (const auto overlap = find_overlap(parameters())) {
    const Tensor& a = states_[overlap->first].parameter;
    const Tensor& b = states_[overlap->second].parameter;
    fail("{}: expected parameters without overlapping elements, got {} of shape {}{}", name_,
         a.is_same(b) ? "one" : "two views that overlap,", a.shape(),
         a.is_same(b) ? fmt::format(" and strides {}", a.strides()) : fmt::format(" and {}", b.shape()));
  }
}

Optimizer::~Optimizer() = default;

void Optimizer::check_gradients() const {
  for (const ParameterState& own : states_) {
    const Tensor& x = own.parameter;
    if (const Tensor grad = x.grad(); grad.defined()) {
      check(grad.dtype() == x.dtype() && grad.device() == x.device(),
            "{}: expected the gradient of a {} parameter on {}, got {} on {}: was the parameter moved between forward "
            "and backward?",
            name_, x.dtype(), x.device(), grad.dtype(), grad.device());
    }
  }
}

void Optimizer::make_states(ParameterState& own) {
  const Tensor& x = own.parameter;
  const Group& group = groups_[own.group];
  const DType dtype = accumulate_dtype(x.dtype());
  const bool makes_states = own.states.size() < group.state_names.size();
  const bool needs_master = group.master_weights && is_16_bit(x.dtype());
  if (makes_states || (needs_master && !own.master.defined())) {
    check(!is_capturing(),
          "{}: a parameter of shape {} takes its first step while a CUDA graph is captured, and each replay would "
          "repeat it: take one step before the capture",
          name_, x.shape());
  }
  while (own.states.size() < group.state_names.size()) {
    own.states.push_back(zeros(x.shape(), dtype, x.device()));
  }
  for (Tensor& state : own.states) {
    if (state.dtype() != dtype || state.device() != x.device()) {
      state = copied(state, dtype, x.device());
    }
  }
  if (!needs_master) {
    own.master = {};
    return;
  }
  if (!own.master.defined()) {
    own.master = copied(x, float32, x.device());
    return;
  }
  if (own.master.device() != x.device()) {
    own.master = copied(own.master, float32, x.device());
  }
  if (own.written != x.handle()->storage.get() || own.version != x.version()) {
    const autograd::NoGrad guard;
    const Tensor value = x.detach();
    own.master = contiguous_data(where(own.master.to(x.dtype()) == value, own.master, value.to(float32)));
  }
}

// Reads the counts from all devices.
void Optimizer::collect_counts() const {
  for (const OnDevice& on : on_device_) {
    const std::vector<std::int64_t> steps = to_vector<std::int64_t>(on.steps);
    for (std::size_t i = 0; i < states_.size(); ++i) {
      if (states_[i].counted_on == on.device) {
        states_[i].step = steps[i];
      }
    }
  }
}

Optimizer::OnDevice& Optimizer::counts_on(Device device) {
  for (OnDevice& on : on_device_) {
    if (on.device == device) {
      return on;
    }
  }
  check_not_capturing(name_);
  std::vector<std::int64_t> steps;
  for (const ParameterState& own : states_) {
    steps.push_back(own.step);
  }
  const auto groups = static_cast<std::int64_t>(groups_.size());
  const auto count = static_cast<std::int64_t>(states_.size());
  const OnDevice made{.device = device,
                      .steps = from_data(steps, {count}, device),
                      .scalars = empty({groups, static_cast<std::int64_t>(scalars_of_group_)}, float64, device)};
  on_device_.push_back(made);
  return on_device_.back();
}

std::vector<Optimizer::Work> Optimizer::collect_work() {
  std::vector<Work> works;
  const auto work_on = [&](Device device) -> Work& {
    for (Work& work : works) {
      if (work.device == device) {
        return work;
      }
    }
    works.emplace_back().device = device;
    return works.back();
  };
  bool moved = false;
  for (ParameterState& own : states_) {
    if (own.parameter.grad().defined()) {
      make_states(own);
      moved = moved || own.counted_on != own.parameter.device();
    }
  }
  if (moved) {
    check_not_capturing(name_);
    collect_counts();
    on_device_.clear();
    for (ParameterState& own : states_) {
      own.counted_on = own.parameter.device();
    }
  }
  for (std::size_t i = 0; i < states_.size(); ++i) {
    const ParameterState& own = states_[i];
    const Tensor& x = own.parameter;
    const Tensor grad = x.grad();
    if (!grad.defined()) {
      continue;
    }
    Work& work = work_on(x.device());
    work.parameters.push_back(x);
    for (const Tensor& used : own.states) {
      work.keep.push_back(used);
    }
    if (own.master.defined()) {
      work.keep.push_back(own.master);
    }
    const auto row_major = [&](const Tensor& tensor) { return work.keep.emplace_back(contiguous_data(tensor)); };
    const Tensor value = row_major(x);
    if (!value.is_same(x)) {
      work.copies.emplace_back(x, value);
    }
    kernels::MultiTensorEntry entry{.param = value.raw_data(),
                                    .grad = row_major(grad).raw_data(),
                                    .numel = x.numel(),
                                    .parameter = static_cast<std::int32_t>(i),
                                    .group = static_cast<std::int32_t>(own.group)};
    const int states = static_cast<int>(own.states.size());
    for (int k = 0; k < states; ++k) {
      entry.states[k] = own.states[k].raw_data();
    }
    if (own.master.defined()) {
      entry.states[states] = own.master.raw_data();
    }
    work.list.add({.dtype = x.dtype(), .states = states, .master = own.master.defined()}, entry);
  }
  for (Work& work : works) {
    work.list.finish(work.device);
  }
  return works;
}

Tensor Optimizer::step(const StepOptions& options) {
  check_gradients();
  const bool wants_norm = options.max_grad_norm.has_value() || options.scaler != nullptr;
  check(!options.max_grad_norm || *options.max_grad_norm >= 0, "{}: expected max_grad_norm >= 0, got {}", name_,
        options.max_grad_norm.value_or(0));
  for (const ParameterState& own : states_) {
    if (own.parameter.grad().defined()) {
      check_can_step(name_, own.parameter, options.scaler != nullptr);
    }
  }
  std::vector<Work> works = collect_work();
  if (works.empty()) {
    return wants_norm ? zeros({}, float64) : Tensor{};
  }
  const Tensor scaler = options.scaler != nullptr ? options.scaler->state() : Tensor{};
  // First, so that the kernels below are adjacent: each starts while the previous one ends.
  for (Work& work : works) {
    const OnDevice& on = counts_on(work.device);
    work.keep.push_back(on.steps);
    // A captured step keeps the tensors that its replays use, and each replay counts as a write to the parameters.
    const bool captured = is_capturing();
    on_each_replay([name = name_, scalars = scalars_, to = on.scalars, keep = captured ? work.keep : Tensors{},
                    written = captured ? work.parameters : Tensors{}] {
      for (const Tensor& parameter : written) {
        check_can_step(name, parameter, false);
      }
      on_device(to.device(), [&](auto d) { memory::write(d, to.raw_data(), scalars->data(), to.bytes()); });
      for (const Tensor& parameter : written) {
        parameter.bump_version("an optimizer's step");
      }
    });
  }
  if (wants_norm) {
    std::vector<DeviceGradients*> gradients;
    gradients.reserve(works.size());
    for (Work& work : works) {
      gradients.push_back(&work);
    }
    start_norm(gradients, options.max_grad_norm.value_or(std::numeric_limits<double>::infinity()), scaler);
    for (Work& work : works) {
      work.norm.sums = sums_of_all_squares(work.norm.sums);
    }
  }
  for (Work& work : works) {
    const OnDevice& on = counts_on(work.device);
    run(work.device, {.list = work.list, .steps = on.steps, .scalars = on.scalars, .norm = work.norm});
    for (const auto& [to, from] : work.copies) {
      copy_into(to, from);
    }
  }
  for (const ParameterState& own : states_) {
    if (own.parameter.grad().defined()) {
      own.parameter.bump_version("an optimizer's step");
    }
  }
  for (ParameterState& own : states_) {
    if (own.parameter.grad().defined()) {
      own.written = own.parameter.handle()->storage.get();
      own.version = own.parameter.version();
    }
  }
  const kernels::GradNorm& norm = works.front().norm;
  if (scaler.defined() && !norm.scaler.is_same(scaler)) {
    copy_into(scaler, norm.scaler);
  }
  return norm.norm;
}

void Optimizer::zero_grad() {
  for (const ParameterState& own : states_) {
    own.parameter.set_grad({});
  }
}

void Optimizer::set_lr(double lr) {
  for (std::size_t group = 0; group < groups_.size(); ++group) {
    set_lr(group, lr);
  }
}

void Optimizer::set_lr(std::size_t group, double lr) {
  check_lr(name_, lr);
  check(group < groups_.size(), "{}: group {} is out of range for {} groups", name_, group, groups_.size());
  (*scalars_)[group * scalars_of_group_] = lr;
}

double Optimizer::lr(std::size_t group) const {
  check(group < groups_.size(), "{}: group {} is out of range for {} groups", name_, group, groups_.size());
  return (*scalars_)[group * scalars_of_group_];
}

Tensors Optimizer::parameters() const {
  Tensors result;
  for (const ParameterState& own : states_) {
    result.push_back(own.parameter);
  }
  return result;
}

StateDict Optimizer::state_dict() const {
  collect_counts();
  StateDict result;
  for (std::size_t i = 0; i < states_.size(); ++i) {
    const ParameterState& own = states_[i];
    if (own.step == 0) {
      continue;
    }
    result.emplace(fmt::format("state.{}.step", i), from_data({own.step}, Shape{}));
    const std::vector<std::string>& names = groups_[own.group].state_names;
    for (std::size_t k = 0; k < own.states.size(); ++k) {
      result.emplace(fmt::format("state.{}.{}", i, names[k]), own.states[k]);
    }
    if (own.master.defined()) {
      result.emplace(fmt::format("state.{}.master", i), own.master);
    }
  }
  return result;
}

void Optimizer::load_state_dict(const StateDict& state) {
  std::vector<ParameterState> loaded = states_;
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
    ParameterState& own = loaded[i];
    const Tensor& x = own.parameter;
    const Group& group = groups_[own.group];
    const Tensor step = find(i, "step", {});
    own.step = step.defined() ? step_count(name_, fmt::format("state.{}.step", i), step) : 0;
    own.counted_on = x.device();
    own.states.clear();
    for (const std::string& name : group.state_names) {
      const Tensor value = find(i, name, x.shape());
      check(value.defined() == step.defined(),
            "{}: load_state_dict: \"state.{}.step\" and \"state.{}.{}\" must be given together", name_, i, i, name);
      if (value.defined()) {
        own.states.push_back(copied(value, accumulate_dtype(x.dtype()), x.device()));
      }
    }
    const Tensor master = find(i, "master", x.shape());
    check(!master.defined() || step.defined(), "{}: load_state_dict: \"state.{}.master\" was given without a step",
          name_, i);
    own.master = master.defined() && group.master_weights && is_16_bit(x.dtype()) ? copied(master, float32, x.device())
                                                                                  : Tensor{};
    own.written = nullptr;  // so that the next step compares the master weights with the parameter
  }
  for (const auto& [name, tensor] : state) {
    check(known.contains(name), "{}: load_state_dict: \"{}\" is unexpected: there are {} parameters", name_, name,
          loaded.size());
  }
  states_ = std::move(loaded);
  on_device_.clear();
}

}  // namespace mica::optim

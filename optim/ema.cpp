#include <algorithm>
#include <cmath>
#include <set>
#include <string>

#include <mica/autograd/grad_mode.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/inplace/inplace.h>
#include <mica/optim/detail/writers.h>
#include <mica/optim/ema.h>

namespace mica::optim {

namespace {

Tensor copied(const Tensor& x, DType dtype) {
  const Tensor result = empty(x.shape(), dtype, x.device());
  copy_into(result, x);
  return result;
}

std::string name_of_average(std::size_t i) { return "average." + std::to_string(i); }

}  // namespace

Ema::Ema(const Tensors& parameters, double decay) : parameters_(parameters), decay_(decay) {
  check(decay >= 0 && decay < 1, "Ema: expected a decay in [0, 1), got {}", decay);
  std::set<const void*> seen;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const Tensor& parameter = parameters[i];
    check(parameter.defined() && is_floating(parameter.dtype()),
          "Ema: expected floating parameters, got {} as number {}",
          parameter.defined() ? mica::name_of(parameter.dtype()) : "an undefined tensor", i);
    check(seen.insert(parameter.handle().get()).second, "Ema: parameter {} was given twice", i);
    averages_.push_back(copied(parameter, accumulate_dtype(parameter.dtype())));
  }
}

void Ema::update() {
  check(!is_swapped(), "Ema: update() was called while the parameters hold the averages; call swap() first");
  const autograd::NoGrad no_grad;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const Tensor& parameter = parameters_[i];
    Tensor& average = averages_[i];
    if (average.device() != parameter.device()) {  // the model has moved
      average = average.to(parameter.device());
    }
    add_(average, parameter.detach().to(average.dtype()) - average, 1 - decay_);
  }
}

Ema::~Ema() {
  for (const Tensor& parameter : is_swapped() ? parameters_ : Tensors{}) {
    parameter.bump_version(kOwnValues);
  }
}

void Ema::check_not_written() const {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const Tensor& x = parameters_[i];
    const Kept& kept = kept_[i];
    if (x.handle()->storage.get() == kept.written && x.version() == kept.version) {
      continue;
    }
    // A parameter that has only moved to another device or dtype still has the average.
    const std::vector<double> now = to_vector<double>(x);
    const std::vector<double> then = to_vector<double>(averages_[i].to(kept.value.dtype()).to(x.dtype()));
    const bool is_average = std::equal(now.begin(), now.end(), then.begin(), then.end(),
                                       [](double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); });
    check(
        is_average,
        "Ema: swap: parameter {} of shape {} was written by {} while it held its average, and swapping back would lose "
        "that",
        i, x.shape(), x.handle()->storage->last_writer());
  }
}

void Ema::swap() {
  const autograd::NoGrad no_grad;
  if (is_swapped()) {
    check_not_written();
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      copy_(parameters_[i], kept_[i].value);
      parameters_[i].bump_version(kOwnValues);
    }
    kept_.clear();
    return;
  }
  std::vector<Kept> kept;
  for (const Tensor& parameter : parameters_) {
    kept.push_back({.value = copied(parameter, parameter.dtype())});
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    copy_(parameters_[i], averages_[i]);
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {  // now, since parameters may share a storage
    parameters_[i].bump_version(kAverages);
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    kept[i].written = parameters_[i].handle()->storage.get();
    kept[i].version = parameters_[i].version();
  }
  kept_ = std::move(kept);
}

StateDict Ema::state_dict() const {
  StateDict state;
  for (std::size_t i = 0; i < averages_.size(); ++i) {
    state[name_of_average(i)] = averages_[i];
  }
  return state;
}

void Ema::load_state_dict(const StateDict& state) {
  check(!is_swapped(), "Ema: load_state_dict() was called while the parameters hold the averages; call swap() first");
  std::string problems;
  for (std::size_t i = 0; i < averages_.size(); ++i) {
    const auto found = state.find(name_of_average(i));
    if (found == state.end()) {
      problems += fmt::format("\n  missing: {}", name_of_average(i));
    } else if (found->second.shape() != averages_[i].shape() || !is_floating(found->second.dtype())) {
      problems += fmt::format("\n  {}: expected floating {}, got {} {}", name_of_average(i), averages_[i].shape(),
                              found->second.dtype(), found->second.shape());
    }
  }
  const StateDict own = state_dict();
  for (const auto& [name, tensor] : state) {
    problems += own.contains(name) ? "" : fmt::format("\n  unexpected: {}", name);
  }
  check(problems.empty(), "Ema: the state does not match:{}", problems);
  Tensors values;  // converted before one is written, since memory may run out
  for (std::size_t i = 0; i < averages_.size(); ++i) {
    const Tensor& value = state.at(name_of_average(i));
    const bool fits = value.dtype() == averages_[i].dtype() && value.device() == averages_[i].device();
    values.push_back(fits ? value : value.detach().to(averages_[i].device(), averages_[i].dtype()));
  }
  for (std::size_t i = 0; i < averages_.size(); ++i) {
    copy_into(averages_[i], values[i]);
    averages_[i].bump_version("load_state_dict");
  }
}

}  // namespace mica::optim

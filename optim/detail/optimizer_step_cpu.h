#pragma once

// A rule applied to each element of many tensors, on the CPU; optim/detail/optimizer_step.cuh has the same function for
// CUDA. Included by *_cpu.cpp only.

#include <algorithm>
#include <functional>
#include <type_traits>
#include <vector>

#include <mica/core/dispatch.h>
#include <mica/core/parallel.h>
#include <mica/optim/detail/grad_norm_kernels.h>
#include <mica/optim/detail/rules.h>

namespace mica {

namespace detail {

inline constexpr std::int64_t kUpdateGrain = 8192;  // elements

template <bool kMaster, class T, class Rule, class... State>
void update_run(const Rule& rule, Accumulate<T> factor, std::int64_t begin, std::int64_t end, T* param, const T* grad,
                [[maybe_unused]] Accumulate<T>* master, State*... states) {
  using A = Accumulate<T>;
  MICA_INDEPENDENT
  for (std::int64_t i = begin; i < end; ++i) {
    A value;
    if constexpr (kMaster) {
      value = master[i];
    } else {
      value = static_cast<A>(param[i]);
    }
    rule(value, static_cast<A>(grad[i]) * factor, states[i]...);
    if constexpr (kMaster) {
      master[i] = value;
    }
    param[i] = static_cast<T>(value);
  }
}

}  // namespace detail

/// rule(param[i], grad[i] · factor, states[i]...) for all elements of one part, in Accumulate<T>. `rule_of(entry)`
/// gives the Rule<A> of an entry. With master weights, the rule works on those and the parameter gets them rounded.
template <template <class> class Rule, class T, bool kMaster, int kStates, class RuleOf>
void update_part(Cpu, const kernels::MultiTensorList& list, const kernels::MultiTensorPart& part, double factor,
                 const RuleOf& rule_of) {
  using A = Accumulate<T>;
  const std::int64_t block = kernels::MultiTensorList::block(part.dtype);
  const kernels::MultiTensorEntry* const first = list.table() + part.first_entry;
  const auto update = [&](std::int64_t begin, std::int64_t end) {
    const kernels::MultiTensorEntry* at = std::upper_bound(
        first, first + part.entries, begin,
        [](std::int64_t number, const kernels::MultiTensorEntry& entry) { return number < entry.first_block; });
    for (--at; at != first + part.entries && at->first_block < end; ++at) {
      const std::int64_t start = std::max<std::int64_t>(begin - at->first_block, 0) * block;
      const std::int64_t stop = std::min(at->numel, (end - at->first_block) * block);
      const Rule<A> rule = rule_of(*at);
      const auto state = [&](int k) { return static_cast<A*>(at->states[k]); };
      [&]<int... k>(std::integer_sequence<int, k...>) {
        detail::update_run<kMaster>(rule, static_cast<A>(factor), start, stop, static_cast<T*>(at->param),
                                    static_cast<const T*>(at->grad), kMaster ? state(kStates) : nullptr, state(k)...);
      }
      (std::make_integer_sequence<int, kStates>());
    }
  };
  // By reference: a copy would allocate, which could fail after other parts were updated and steps were counted.
  parallel_for(part.blocks, detail::kUpdateGrain / block, std::cref(update));
}

namespace kernels {

template <template <class> class Rule>
void optimizer_step(Cpu device, const OptimizerStep& step) {
  std::vector<Rule<double>> rules(step.steps.numel());
  if (step.norm.sums.defined()) {
    grad_norm(device, step.norm);
  }
  const auto* const control = reinterpret_cast<const StepControl*>(step.norm.control.data_or_null<double>());
  if (control != nullptr && control->skip != 0) {
    return;
  }
  std::int64_t* const steps = step.steps.data<std::int64_t>();
  const double* const scalars = step.scalars.data<double>();
  for (std::int64_t i = 0; i < step.list.entries(); ++i) {
    const MultiTensorEntry& entry = step.list.table()[i];
    rules[entry.parameter] =
        Rule<double>::at_step(scalars + entry.group * Rule<double>::kScalars, ++steps[entry.parameter]);
  }
  for (const MultiTensorPart& part : step.list.parts()) {
    on_part<Rule>(Rule<double>::kName, part, [&]<class T, bool kMaster, int kStates>() {
      update_part<Rule, T, kMaster, kStates>(
          device, step.list, part, control != nullptr ? control->factor : 1,
          [&](const MultiTensorEntry& entry) { return Rule<Accumulate<T>>::rounded(rules[entry.parameter]); });
    });
  }
}

}  // namespace kernels

}  // namespace mica

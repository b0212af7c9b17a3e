#pragma once

// A rule applied to each element of many tensors, on CUDA: see optim/detail/optimizer_step_cpu.h.
//
//     sums of squares, steps ──> make_rules_kernel ──> one rule per tensor, factor of all gradients, or skip
//                                                         │
//                     param, grad, states, master ──> update_kernel ──> param, states, master
//
// update_kernel's variants are for each optimizer's rule and number of states, each dtype, and master weights.

#include <cstdint>
#include <utility>

#include <mica/core/creation.h>
#include <mica/core/cuda/launch.h>
#include <mica/core/cuda/pack.cuh>
#include <mica/core/cuda/ptx.cuh>
#include <mica/core/dispatch.h>
#include <mica/optim/detail/grad_norm.cuh>
#include <mica/optim/detail/rules.h>

namespace mica {

namespace detail {

inline constexpr int kMultiTensorThreads = 256;

/// The entry that contains `chunk` of its part, for all threads of a block; `first_of(entry)` is an entry's first
/// chunk. Contains a block barrier.
template <class FirstOf>
__device__ const kernels::MultiTensorEntry& entry_of(const kernels::MultiTensorEntry* first, std::int64_t entries,
                                                     std::int64_t chunk, const FirstOf& first_of) {
  int not_after = 0;  // entries that begin at this chunk or before; the last of them contains it
  for (std::int64_t i = threadIdx.x; i - threadIdx.x < entries; i += kMultiTensorThreads) {
    not_after += __syncthreads_count(i < entries && first_of(first[i]) <= chunk);
  }
  return first[not_after - 1];
}

// Elements per thread: 16 bytes of the accumulation type, so that a thread block updates one block of the list.
template <class T>
inline constexpr int kUpdateVector = 16 / static_cast<int>(sizeof(Accumulate<T>));

template <class T>
__device__ bool has_alignment(const void* data) {
  return reinterpret_cast<std::uintptr_t>(data) % alignof(T) == 0;
}

/// The elements of a thread: one pack, or fewer at the end of a tensor.
template <class T, class Rule, bool kMaster, int kStates>
struct UpdatedElements {
  using A = Accumulate<T>;
  static constexpr int kVector = kUpdateVector<T>;
  static constexpr int kArrays = kStates + kMaster;
  static constexpr int kLength = kArrays > 0 ? kArrays : 1;
  using ValuePack = cuda::Pack<T, kVector>;
  using StatePack = cuda::Pack<A, kVector>;

  const Rule& rule;
  A factor;  // of the gradient
  T* param;
  const T* grad;
  A* states[kLength];  // the master weights are the last ones

  __device__ UpdatedElements(const kernels::MultiTensorEntry& entry, std::int64_t at, const Rule& rule, A factor)
      : rule(rule),
        factor(factor),
        param(static_cast<T*>(entry.param) + at),
        grad(static_cast<const T*>(entry.grad) + at) {
#pragma unroll
    for (int k = 0; k < kArrays; ++k) {
      states[k] = static_cast<A*>(entry.states[k]) + at;
    }
  }

  /// Whether packs can be read and written.
  __device__ bool is_aligned() const {
    bool aligned = has_alignment<ValuePack>(param) && has_alignment<ValuePack>(grad);
#pragma unroll
    for (int k = 0; k < kArrays; ++k) {
      aligned = aligned && has_alignment<StatePack>(states[k]);
    }
    return aligned;
  }

  /// Applies the rule to one element.
  __device__ void update(T& p, T g, A (&s)[kLength]) const {
    A value;
    if constexpr (kMaster) {
      value = s[kStates];
    } else {
      value = static_cast<A>(p);
    }
    const A scaled = static_cast<A>(g) * factor;
    if constexpr (kStates == 0) {
      rule(value, scaled);
    } else if constexpr (kStates == 1) {
      rule(value, scaled, s[0]);
    } else {
      rule(value, scaled, s[0], s[1]);
    }
    if constexpr (kMaster) {
      s[kStates] = value;
    }
    p = static_cast<T>(value);
  }

  __device__ void update_pack() const {
    ValuePack p;
    StatePack s[kLength];
    const ValuePack g = *reinterpret_cast<const ValuePack*>(grad);
    if constexpr (!kMaster) {
      p = *reinterpret_cast<const ValuePack*>(param);
    }
#pragma unroll
    for (int k = 0; k < kArrays; ++k) {
      s[k] = *reinterpret_cast<const StatePack*>(states[k]);
    }
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      A element[kLength];
#pragma unroll
      for (int k = 0; k < kArrays; ++k) {
        element[k] = s[k].at[e];
      }
      update(p.at[e], g.at[e], element);
#pragma unroll
      for (int k = 0; k < kArrays; ++k) {
        s[k].at[e] = element[k];
      }
    }
#pragma unroll
    for (int k = 0; k < kArrays; ++k) {
      *reinterpret_cast<StatePack*>(states[k]) = s[k];
    }
    *reinterpret_cast<ValuePack*>(param) = p;
  }

  __device__ void update_each(int n) const {
    for (int i = 0; i < n; ++i) {
      A element[kLength];
#pragma unroll
      for (int k = 0; k < kArrays; ++k) {
        element[k] = states[k][i];
      }
      update(param[i], grad[i], element);
#pragma unroll
      for (int k = 0; k < kArrays; ++k) {
        states[k][i] = element[k];
      }
    }
  }
};

// One pack per thread. Concurrent blocks then access neighboring memory, which suits DRAM: loops over longer chunks,
// persistent blocks and cache hints were all slower (an H200 moves 4.15 TB/s this way).
template <class T, class Rule, bool kMaster, int kStates, class RuleOf>
__global__ void __launch_bounds__(kMultiTensorThreads)
    update_kernel(const kernels::MultiTensorEntry* first, std::int64_t entries, RuleOf rule_of,
                  const kernels::StepControl* control) {
  constexpr int kVector = kUpdateVector<T>;
  cuda::wait_for_previous_kernel();
  Accumulate<T> factor = 1;
  if (control != nullptr) {
    if (control->skip != 0) {
      return;
    }
    factor = static_cast<Accumulate<T>>(control->factor);
  }
  if constexpr (requires { Rule::kOnlyScales; }) {
    if (factor == 1) {
      return;
    }
  }
  const kernels::MultiTensorEntry& entry =
      entry_of(first, entries, blockIdx.x, [](const kernels::MultiTensorEntry& e) { return e.first_block; });
  const std::int64_t at = ((blockIdx.x - entry.first_block) * kMultiTensorThreads + threadIdx.x) * kVector;
  const int n = static_cast<int>(entry.numel - at < kVector ? entry.numel - at : kVector);
  if (n <= 0) {
    return;
  }
  const Rule rule = rule_of(entry);
  const UpdatedElements<T, Rule, kMaster, kStates> elements(entry, at, rule, factor);
  if (n == kVector && elements.is_aligned()) {
    elements.update_pack();
  } else {
    elements.update_each(n);
  }
}

// Finishes the norm if there are sums; counts the step of each entry and computes its rule. Runs in one block.
template <template <class> class Rule>
__global__ void __launch_bounds__(kernels::kNormThreads)
    make_rules_kernel(const kernels::MultiTensorEntry* table, std::int64_t entries, const double* scalars,
                      std::int64_t* steps, Rule<double>* rules, kernels::GradNormPointers norm) {
  cuda::allow_dependents();
  cuda::wait_for_previous_kernel();
  kernels::finish_grad_norm_in_block(norm);
  if (norm.control != nullptr && norm.control->skip != 0) {
    return;
  }
  for (std::int64_t i = threadIdx.x; i < entries; i += kernels::kNormThreads) {
    const int parameter = table[i].parameter;
    rules[parameter] = Rule<double>::at_step(scalars + table[i].group * Rule<double>::kScalars, ++steps[parameter]);
  }
}

template <template <class> class Rule, class A>
struct RuleFromTable {
  const Rule<double>* rules;
  __device__ Rule<A> operator()(const kernels::MultiTensorEntry& entry) const {
    return Rule<A>::rounded(rules[entry.parameter]);
  }
};

}  // namespace detail

/// rule(param[i], grad[i] · factor, states[i]...) for all elements of one part, in Accumulate<T>.
template <template <class> class Rule, class T, bool kMaster, int kStates, class RuleOf>
void update_part(Cuda, const char* name, const kernels::MultiTensorList& list, const kernels::MultiTensorPart& part,
                 const Tensor& control, const RuleOf& rule_of) {
  if (part.blocks == 0) {
    return;
  }
  check(part.blocks <= INT32_MAX, "{}: {} parameters of {} in one step are too many", name,
        part.blocks * kernels::MultiTensorList::block(part.dtype), part.dtype);
  cuda::Launch(static_cast<unsigned>(part.blocks), detail::kMultiTensorThreads)
      .dependent()
      .run(detail::update_kernel<T, Rule<Accumulate<T>>, kMaster, kStates, RuleOf>, name,
           list.table() + part.first_entry, part.entries, rule_of,
           reinterpret_cast<const kernels::StepControl*>(control.data_or_null<double>()));
}

namespace kernels {

template <template <class> class Rule>
void optimizer_step(Cuda device, const OptimizerStep& step) {
  constexpr std::int64_t kRuleDoubles = sizeof(Rule<double>) / sizeof(double);
  const Tensor rules = empty({step.steps.numel(), kRuleDoubles}, float64, step.steps.device());
  auto* const rules_data = reinterpret_cast<Rule<double>*>(rules.data<double>());
  cuda::Launch(1, kNormThreads)
      .dependent()
      .run(mica::detail::make_rules_kernel<Rule>, "make_rules_kernel", step.list.table(), step.list.entries(),
           step.scalars.data<double>(), step.steps.data<std::int64_t>(), rules_data, GradNormPointers(step.norm));
  for (const MultiTensorPart& part : step.list.parts()) {
    on_part<Rule>(Rule<double>::kName, part, [&]<class T, bool kMaster, int kStates>() {
      update_part<Rule, T, kMaster, kStates>(device, Rule<double>::kName, step.list, part, step.norm.control,
                                             mica::detail::RuleFromTable<Rule, Accumulate<T>>{rules_data});
    });
  }
}

}  // namespace kernels

}  // namespace mica

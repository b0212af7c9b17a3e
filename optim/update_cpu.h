#pragma once

// One pass over a parameter, its gradient and what the optimizer keeps for it, on the CPU; optim/update.cuh has the
// same function for CUDA. Included by *_cpu.cpp only.

#include <concepts>

#include <mica/core/dispatch.h>
#include <mica/core/parallel.h>

namespace mica {

namespace detail {

inline constexpr std::int64_t kUpdateGrain = 8192;  // elements

template <class T, class Rule, std::same_as<Accumulate<T>>... State>
void update_run(const Rule& rule, std::int64_t begin, std::int64_t end, T* param, const T* grad, State*... states) {
  using A = Accumulate<T>;
  MICA_INDEPENDENT
  for (std::int64_t i = begin; i < end; ++i) {
    A value = static_cast<A>(param[i]);
    rule(value, static_cast<A>(grad[i]), states[i]...);
    param[i] = static_cast<T>(value);
  }
}

}  // namespace detail

/// rule(param[i], grad[i], states[i]...) for all elements, in Accumulate<T>: `Rule<A>(args)` is the rule for type A.
/// All tensors are row-major; states are of the accumulation dtype.
template <template <class> class Rule, class Args, std::same_as<Tensor>... State>
void update(Cpu, const Args& args, const char* name, const Tensor& param, const Tensor& grad, const State&... states) {
  on_dtype(FloatTypes{}, param.dtype(), name, [&]<class T>() {
    using A = Accumulate<T>;
    const Rule<A> rule(args);
    T* const p = param.data<T>();
    const T* const g = grad.data<T>();
    parallel_for(param.numel(), detail::kUpdateGrain, [&](std::int64_t begin, std::int64_t end) {
      detail::update_run(rule, begin, end, p, g, states.template data<A>()...);
    });
  });
}

}  // namespace mica

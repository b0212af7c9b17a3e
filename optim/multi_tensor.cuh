#pragma once

// A rule applied to each element of many tensors, on CUDA: see optim/multi_tensor_cpu.h.

#include <cstdint>
#include <utility>

#include <mica/core/creation.h>
#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/core/dispatch.h>
#include <mica/optim/step_kernels.h>

namespace mica {

namespace detail {

inline constexpr int kMultiTensorThreads = 256;

/// The entry that `chunk` belongs to, for all threads of a block. A block barrier.
__device__ inline const kernels::MultiTensorEntry& entry_of_chunk(const kernels::MultiTensorEntry* first,
                                                                  std::int64_t entries, std::int64_t chunk) {
  int not_after = 0;  // entries that begin at this chunk or before; the last of them has it
  for (std::int64_t i = threadIdx.x; i - threadIdx.x < entries; i += kMultiTensorThreads) {
    not_after += __syncthreads_count(i < entries && first[i].first_chunk <= chunk);
  }
  return first[not_after - 1];
}

// Elements that a thread moves at once: 16 bytes of the accumulation type.
template <class T>
inline constexpr int kUpdateVector = 16 / static_cast<int>(sizeof(Accumulate<T>));

template <class T, int kSize>
struct alignas(sizeof(T) * kSize) UpdatePack {
  T value[kSize];
};

// Loads and stores of what is not used again before much else has passed through the cache.
template <class Pack>
__device__ Pack load_streaming(const Pack* at) {
  if constexpr (sizeof(Pack) == 16) {
    const float4 bits = __ldcs(reinterpret_cast<const float4*>(at));
    return reinterpret_cast<const Pack&>(bits);
  } else {
    static_assert(sizeof(Pack) == 8);
    const float2 bits = __ldcs(reinterpret_cast<const float2*>(at));
    return reinterpret_cast<const Pack&>(bits);
  }
}

template <class Pack>
__device__ void store_streaming(Pack* at, const Pack& pack) {
  if constexpr (sizeof(Pack) == 16) {
    __stcs(reinterpret_cast<float4*>(at), reinterpret_cast<const float4&>(pack));
  } else {
    static_assert(sizeof(Pack) == 8);
    __stcs(reinterpret_cast<float2*>(at), reinterpret_cast<const float2&>(pack));
  }
}

template <class T>
__device__ bool has_alignment(const void* data) {
  return reinterpret_cast<std::uintptr_t>(data) % alignof(T) == 0;
}

// One block a chunk. The chunks go backward: when the norm was computed before, the gradients it read last are still in
// the L2 cache.
template <class T, class Rule, bool kMaster, int kStates, class RuleOf>
__global__ void __launch_bounds__(kMultiTensorThreads)
    update_kernel(const kernels::MultiTensorEntry* first, std::int64_t entries, std::int64_t first_chunk,
                  RuleOf rule_of, const kernels::StepControl* control) {
  using A = Accumulate<T>;
  constexpr int kVector = kUpdateVector<T>;
  constexpr int kUnroll = 2;
  constexpr int kArrays = kStates + kMaster;
  constexpr int kChunk = static_cast<int>(kernels::MultiTensorList::kChunk);
  using ValuePack = UpdatePack<T, kVector>;
  using StatePack = UpdatePack<A, kVector>;

  A factor = 1;
  if (control != nullptr) {
    if (control->skip != 0) {
      return;
    }
    factor = static_cast<A>(control->factor);
  }
  if constexpr (requires { Rule::kOnlyScales; }) {
    if (factor == 1) {
      return;
    }
  }
  const std::int64_t chunk = first_chunk + (gridDim.x - 1 - blockIdx.x);
  const kernels::MultiTensorEntry& entry = entry_of_chunk(first, entries, chunk);
  const Rule rule = rule_of(entry);
  const std::int64_t start = (chunk - entry.first_chunk) * kChunk;
  const int n = entry.numel - start < kChunk ? static_cast<int>(entry.numel - start) : kChunk;
  T* const param = static_cast<T*>(entry.param) + start;
  const T* const grad = static_cast<const T*>(entry.grad) + start;
  A* states[kArrays > 0 ? kArrays : 1];
  bool aligned = has_alignment<ValuePack>(param) && has_alignment<ValuePack>(grad);
#pragma unroll
  for (int k = 0; k < kArrays; ++k) {
    states[k] = static_cast<A*>(entry.states[k]) + start;
    aligned = aligned && has_alignment<StatePack>(states[k]);
  }

  const auto update = [&](T& p, T g, A(&s)[kArrays > 0 ? kArrays : 1]) {
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
  };

  const int packs = aligned ? n / kVector : 0;
  for (int i = threadIdx.x; i < packs; i += kUnroll * kMultiTensorThreads) {
    ValuePack p[kUnroll];
    ValuePack g[kUnroll];
    StatePack s[kUnroll][kArrays > 0 ? kArrays : 1];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int at = i + u * kMultiTensorThreads;
      if (at < packs) {
        g[u] = load_streaming(reinterpret_cast<const ValuePack*>(grad) + at);
        if constexpr (!kMaster) {
          p[u] = reinterpret_cast<const ValuePack*>(param)[at];
        }
#pragma unroll
        for (int k = 0; k < kArrays; ++k) {
          s[u][k] = load_streaming(reinterpret_cast<const StatePack*>(states[k]) + at);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int at = i + u * kMultiTensorThreads;
      if (at < packs) {
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          A element[kArrays > 0 ? kArrays : 1];
#pragma unroll
          for (int k = 0; k < kArrays; ++k) {
            element[k] = s[u][k].value[e];
          }
          update(p[u].value[e], g[u].value[e], element);
#pragma unroll
          for (int k = 0; k < kArrays; ++k) {
            s[u][k].value[e] = element[k];
          }
        }
#pragma unroll
        for (int k = 0; k < kArrays; ++k) {
          store_streaming(reinterpret_cast<StatePack*>(states[k]) + at, s[u][k]);
        }
        reinterpret_cast<ValuePack*>(param)[at] = p[u];
      }
    }
  }
  for (int i = packs * kVector + static_cast<int>(threadIdx.x); i < n; i += kMultiTensorThreads) {
    A element[kArrays > 0 ? kArrays : 1];
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

// Counts the step of each entry and makes its rule.
template <template <class> class Rule>
__global__ void make_rules_kernel(const kernels::MultiTensorEntry* table, std::int64_t entries, const double* scalars,
                                  std::int64_t* steps, Rule<double>* rules, const kernels::StepControl* control) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= entries || (control != nullptr && control->skip != 0)) {
    return;
  }
  const int slot = table[i].slot;
  rules[slot] = Rule<double>::at_step(scalars + table[i].group * Rule<double>::kScalars, ++steps[slot]);
}

template <template <class> class Rule, class A>
struct RuleFromTable {
  const Rule<double>* rules;
  __device__ Rule<A> operator()(const kernels::MultiTensorEntry& entry) const {
    return Rule<A>::rounded(rules[entry.slot]);
  }
};

}  // namespace detail

/// rule(param[i], grad[i] · factor, states[i]...) for all elements of one part, in Accumulate<T>.
template <template <class> class Rule, class T, bool kMaster, int kStates, class RuleOf>
void update_part(Cuda, const char* name, const kernels::MultiTensorList& list, const kernels::MultiTensorPart& part,
                 const Tensor& control, const RuleOf& rule_of) {
  if (part.chunks > 0) {
    detail::update_kernel<T, Rule<Accumulate<T>>, kMaster, kStates>
        <<<static_cast<unsigned>(part.chunks), detail::kMultiTensorThreads, 0, cuda::current_stream()>>>(
            list.table() + part.first_entry, part.entries, part.first_chunk, rule_of,
            reinterpret_cast<const kernels::StepControl*>(control.data_or_null<double>()));
    cuda::check_launch(name);
  }
}

/// One step of an optimizer: counts it, makes the rules and applies them. The host reads nothing of it.
template <template <class> class Rule>
void optimizer_step(Cuda device, const char* name, const kernels::OptimizerStep& step) {
  constexpr std::int64_t kRuleDoubles = sizeof(Rule<double>) / sizeof(double);
  constexpr int kThreads = 128;
  const std::int64_t entries = step.list.entries();
  const Tensor rules = empty({step.steps.numel(), kRuleDoubles}, float64, step.steps.device());
  auto* const rules_data = reinterpret_cast<Rule<double>*>(rules.data<double>());
  detail::make_rules_kernel<Rule>
      <<<static_cast<unsigned>((entries + kThreads - 1) / kThreads), kThreads, 0, cuda::current_stream()>>>(
          step.list.table(), entries, step.scalars.data<double>(), step.steps.data<std::int64_t>(), rules_data,
          reinterpret_cast<const kernels::StepControl*>(step.control.data_or_null<double>()));
  cuda::check_launch("make_rules_kernel");
  for (const kernels::MultiTensorPart& part : step.list.parts()) {
    kernels::on_part<Rule>(name, part, [&]<class T, bool kMaster, int kStates>() {
      update_part<Rule, T, kMaster, kStates>(device, name, step.list, part, step.control,
                                             detail::RuleFromTable<Rule, Accumulate<T>>{rules_data});
    });
  }
}

}  // namespace mica

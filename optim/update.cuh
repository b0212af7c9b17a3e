#pragma once

// One pass over a parameter, its gradient and what the optimizer keeps for it, on CUDA: see optim/update_cpu.h.

#include <algorithm>
#include <concepts>
#include <cstdint>

#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>

namespace mica {

namespace detail {

// Elements that one access moves: 16 bytes of the accumulation type.
template <class T>
inline constexpr int kUpdateVector = 16 / static_cast<int>(sizeof(Accumulate<T>));

template <class T>
struct alignas(sizeof(T) * kUpdateVector<T>) UpdatePack {
  T value[kUpdateVector<T>];
};

template <class T>
struct alignas(16) StatePack {
  Accumulate<T> value[kUpdateVector<T>];
};

template <class T, class Rule, class... State>
__device__ void update_element(const Rule& rule, T& param, const T& grad, State&... states) {
  using A = Accumulate<T>;
  A value = static_cast<A>(param);
  rule(value, static_cast<A>(grad), states...);
  param = static_cast<T>(value);
}

// Elements before `vectorized` go in packs, the rest one by one.
template <class T, class Rule, class... State>
__global__ void update_kernel(Rule rule, std::int64_t n, std::int64_t vectorized, T* param, const T* grad,
                              State*... states) {
  constexpr int kVector = kUpdateVector<T>;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = first; i < vectorized / kVector; i += step) {
    UpdatePack<T>* const param_at = reinterpret_cast<UpdatePack<T>*>(param) + i;
    UpdatePack<T> p = *param_at;
    const UpdatePack<T> g = reinterpret_cast<const UpdatePack<T>*>(grad)[i];
    const auto run = [&](auto... packs) {  // the states, by value: held in registers until they are written back
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        update_element(rule, p.value[k], g.value[k], packs.value[k]...);
      }
      ((reinterpret_cast<StatePack<T>*>(states)[i] = packs), ...);
    };
    run(reinterpret_cast<const StatePack<T>*>(states)[i]...);
    *param_at = p;
  }
  for (std::int64_t i = vectorized + first; i < n; i += step) {
    update_element(rule, param[i], grad[i], states[i]...);
  }
}

template <class T>
bool is_aligned(const void* data) {
  return reinterpret_cast<std::uintptr_t>(data) % alignof(T) == 0;
}

}  // namespace detail

template <template <class> class Rule, class Args, std::same_as<Tensor>... State>
void update(Cuda, const Args& args, const char* name, const Tensor& param, const Tensor& grad, const State&... states) {
  if (param.numel() == 0) {
    return;
  }
  on_dtype(FloatTypes{}, param.dtype(), name, [&]<class T>() {
    using A = Accumulate<T>;
    constexpr int kThreads = 256;
    constexpr int kVector = detail::kUpdateVector<T>;
    const std::int64_t n = param.numel();
    const bool aligned = detail::is_aligned<detail::UpdatePack<T>>(param.raw_data()) &&
                         detail::is_aligned<detail::UpdatePack<T>>(grad.raw_data()) &&
                         (detail::is_aligned<detail::StatePack<T>>(states.raw_data()) && ...);
    const std::int64_t vectorized = aligned ? n / kVector * kVector : 0;
    const std::int64_t tasks = std::max(vectorized / kVector, n - vectorized);
    const auto blocks = static_cast<unsigned>(std::min<std::int64_t>((tasks + kThreads - 1) / kThreads, 1 << 16));
    detail::update_kernel<T><<<blocks, kThreads, 0, cuda::current_stream()>>>(
        Rule<A>(args), n, vectorized, param.data<T>(), static_cast<const T*>(grad.data<T>()),
        states.template data<A>()...);
    cuda::check_launch(name);
  });
}

}  // namespace mica

#pragma once

// Element-wise loops on the CPU; core/cuda/elementwise.cuh has the same function for CUDA. Included by *_cpu.cpp only.

#include <algorithm>
#include <array>
#include <concepts>
#include <tuple>
#include <utility>

#include <mica/core/dispatch.h>
#include <mica/core/parallel.h>
#include <mica/core/strided.h>

namespace mica {

namespace detail {

// Work for one thread, in elements, below which another thread costs more than it saves.
inline constexpr std::int64_t kElementwiseGrain = 16384;

// One run along the innermost axis. Strides of 0 and 1 are known to the compiler, so that it can vectorize.
template <class F, class Out, class... In, std::size_t... I>
void elementwise_run(const F& f, std::int64_t n, Out* out, std::int64_t out_stride, std::tuple<const In*...> in,
                     const std::array<std::int64_t, sizeof...(In)>& steps, std::index_sequence<I...>) {
  constexpr std::size_t kInputs = sizeof...(In);
  const auto value = [](auto element) { return static_cast<Accumulate<decltype(element)>>(element); };
  const bool unit = out_stride == 1;
  if (unit && ((steps[I] == 1) && ...)) {
    MICA_INDEPENDENT
    for (std::int64_t i = 0; i < n; ++i) {
      out[i] = static_cast<Out>(f(value(std::get<I>(in)[i])...));
    }
    return;
  }
  if constexpr (kInputs == 2) {
    const auto [a, b] = in;
    if (unit && steps[0] == 1 && steps[1] == 0) {
      const auto right = value(*b);
      MICA_INDEPENDENT
      for (std::int64_t i = 0; i < n; ++i) {
        out[i] = static_cast<Out>(f(value(a[i]), right));
      }
      return;
    }
    if (unit && steps[0] == 0 && steps[1] == 1) {
      const auto left = value(*a);
      MICA_INDEPENDENT
      for (std::int64_t i = 0; i < n; ++i) {
        out[i] = static_cast<Out>(f(left, value(b[i])));
      }
      return;
    }
  }
  for (std::int64_t i = 0; i < n; ++i) {
    out[i * out_stride] = static_cast<Out>(f(value(std::get<I>(in)[i * steps[I]])...));
  }
}

}  // namespace detail

/// out[i] = f(in[i]...) over all elements, the inputs broadcast to out's shape. Out and In are the element types; f
/// sees 16-bit floats as float.
template <class Out, class... In, class F, std::same_as<Tensor>... T>
requires(sizeof...(In) == sizeof...(T)) void elementwise(Cpu, F f, const Tensor& out, const T&... in) {
  constexpr int kInputs = sizeof...(In);
  const StridedLoop<kInputs + 1> loop(out.shape(), {&out, &in...});
  Out* const out_data = out.data<Out>();
  const std::tuple<const In*...> in_data{in.template data<In>()...};
  const std::int64_t inner = loop.inner_size();

  parallel_for(loop.numel, detail::kElementwiseGrain, [&](std::int64_t begin, std::int64_t end) {
    [&]<std::size_t... I>(std::index_sequence<I...> all) {
      while (begin < end) {
        // Where element `begin` lies in each tensor.
        std::array<std::int64_t, kInputs + 1> at{};
        std::int64_t rest = begin;
        for (int axis = loop.rank - 1; axis >= 0; --axis) {
          const std::int64_t index = rest % loop.sizes[axis];
          rest /= loop.sizes[axis];
          for (int t = 0; t <= kInputs; ++t) {
            at[t] += index * loop.strides[t][axis];
          }
        }
        const std::int64_t count = std::min(end - begin, inner - begin % inner);
        detail::elementwise_run<F, Out, In...>(f, count, out_data + at[0], loop.inner_stride(0),
                                               {std::get<I>(in_data) + at[I + 1]...}, {loop.inner_stride(I + 1)...},
                                               all);
        begin += count;
      }
    }
    (std::make_index_sequence<kInputs>());
  });
}

}  // namespace mica

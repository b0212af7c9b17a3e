#pragma once

// Element-wise loops on the CPU; core/cuda/elementwise.cuh has the same function for CUDA. Included by *_cpu.cpp only.

#include <algorithm>
#include <array>
#include <concepts>
#include <functional>
#include <tuple>
#include <utility>

#include <mica/core/dispatch.h>
#include <mica/core/parallel.h>
#include <mica/core/strided.h>

namespace mica {

namespace detail {

// Work for one thread, in elements, below which another thread costs more than it saves.
inline constexpr std::int64_t kElementwiseGrain = 16384;

// One input along the innermost axis: elements `step` apart, or the number `scalar` where there is no data.
template <class T>
struct InputRun {
  const T* data;
  Accumulate<T> scalar;
  std::int64_t step;

  InputRun(const Operand& operand, std::int64_t inner_stride)
      : data(operand.tensor != nullptr ? operand.tensor->data<T>() : nullptr),
        scalar(static_cast<Accumulate<T>>(operand.scalar)),
        step(inner_stride) {}

  InputRun from(std::int64_t offset) const {
    InputRun run = *this;
    run.data = data != nullptr ? data + offset : nullptr;
    return run;
  }
  Accumulate<T> at(std::int64_t i) const {
    return data != nullptr ? static_cast<Accumulate<T>>(data[i * step]) : scalar;
  }
  bool constant() const { return step == 0; }
};

// Loops over types that have no vectors stay as they are.
#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed"
#endif

// One run along the innermost axis. Strides of 0 and 1 are known to the compiler, so that it can vectorize; to that end
// all of f must be inlined, however much there is of it.
template <class F, class Out, class... In>
[[gnu::flatten]] void elementwise_run(const F& f, std::int64_t n, Out* out, std::int64_t out_stride,
                                      const InputRun<In>&... in) {
  if (out_stride == 1 && ((in.step == 1) && ...)) {
    [f, n, out](const In*... data) {
      MICA_INDEPENDENT
      for (std::int64_t i = 0; i < n; ++i) {
        out[i] = static_cast<Out>(f(static_cast<Accumulate<In>>(data[i])...));
      }
    }(in.data...);
    return;
  }
  if constexpr (sizeof...(In) == 2) {
    const bool done = [&](const auto& a, const auto& b) {
      if (out_stride == 1 && a.step == 1 && b.constant()) {
        const auto* left = a.data;
        const auto right = b.at(0);
        MICA_INDEPENDENT
        for (std::int64_t i = 0; i < n; ++i) {
          out[i] = static_cast<Out>(f(static_cast<std::decay_t<decltype(a.at(0))>>(left[i]), right));
        }
        return true;
      }
      if (out_stride == 1 && a.constant() && b.step == 1) {
        const auto left = a.at(0);
        const auto* right = b.data;
        MICA_INDEPENDENT
        for (std::int64_t i = 0; i < n; ++i) {
          out[i] = static_cast<Out>(f(left, static_cast<std::decay_t<decltype(b.at(0))>>(right[i])));
        }
        return true;
      }
      return false;
    }(in...);
    if (done) {
      return;
    }
  }
  for (std::int64_t i = 0; i < n; ++i) {
    out[i * out_stride] = static_cast<Out>(f(in.at(i)...));
  }
}

#if defined(__clang__)
#pragma clang diagnostic pop
#endif

}  // namespace detail

/// out[i] = f(in[i]...) over all elements. Inputs are Tensors, which broadcast to out's shape, or numbers. Out and In
/// are the element types; f sees 16-bit floats as float.
template <class Out, class... In, class F, std::convertible_to<Operand>... T>
requires(sizeof...(In) == sizeof...(T)) void elementwise(Cpu, F f, const Tensor& out, const T&... in) {
  constexpr int kInputs = sizeof...(In);
  const std::array<Operand, kInputs + 1> operands{Operand(out), Operand(in)...};
  std::array<const Tensor*, kInputs + 1> tensors{};
  for (int t = 0; t <= kInputs; ++t) {
    tensors[t] = operands[t].tensor;
  }
  const StridedLoop<kInputs + 1> loop(out.shape(), tensors);
  Out* const out_data = out.data<Out>();
  const std::int64_t inner = loop.inner_size();

  [&]<std::size_t... I>(std::index_sequence<I...>) {
    const std::tuple<detail::InputRun<In>...> inputs{
        detail::InputRun<In>(operands[I + 1], loop.inner_stride(static_cast<int>(I) + 1))...};
    const auto body = [&](std::int64_t begin, std::int64_t end) {
      // Where element `begin` lies: along each axis, and in each tensor.
      std::array<std::int64_t, kMaxRank> index{};
      std::array<std::int64_t, kInputs + 1> at{};
      std::int64_t rest = begin;
      for (int axis = loop.rank - 1; axis >= 0 && rest > 0; --axis) {
        index[axis] = rest % loop.sizes[axis];
        rest /= loop.sizes[axis];
        for (int t = 0; t <= kInputs; ++t) {
          at[t] += index[axis] * loop.strides[t][axis];
        }
      }
      while (begin < end) {
        const int last = loop.rank - 1;
        const std::int64_t count = std::min(end - begin, inner - index[last]);
        detail::elementwise_run<F, Out, In...>(f, count, out_data + at[0], loop.inner_stride(0),
                                               std::get<I>(inputs).from(at[I + 1])...);
        begin += count;
        // On to the start of the next run.
        for (int t = 0; t <= kInputs; ++t) {
          at[t] -= index[last] * loop.strides[t][last];
        }
        index[last] = 0;
        for (int axis = last - 1; axis >= 0; --axis) {
          const bool wraps = ++index[axis] == loop.sizes[axis];
          for (int t = 0; t <= kInputs; ++t) {
            at[t] += loop.strides[t][axis] * (wraps ? 1 - loop.sizes[axis] : 1);
          }
          if (!wraps) {
            break;
          }
          index[axis] = 0;
        }
      }
    };
    if (loop.numel <= detail::kElementwiseGrain) {
      body(0, loop.numel);
    } else {
      parallel_for(loop.numel, detail::kElementwiseGrain, std::ref(body));
    }
  }
  (std::make_index_sequence<kInputs>());
}

}  // namespace mica

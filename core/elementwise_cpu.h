#pragma once

// Element-wise loops on the CPU; core/cuda/elementwise.cuh has the same function for CUDA. Included by *_cpu.cpp only.

#include <array>
#include <concepts>
#include <tuple>
#include <utility>

#include <mica/core/dispatch.h>
#include <mica/core/parallel.h>
#include <mica/core/strided.h>

namespace mica {

namespace detail {

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

// Loops over types without vector instructions are not vectorized.
#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed"
#endif

// One run along the innermost axis. Strides of 0 and 1 are compile-time constants, so that the compiler vectorizes;
// this requires f to be inlined completely.
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

/// Calls run(closure, count, at) for each run along the loop's innermost axis: `count` elements, the first of them at
/// offset at[t] in tensor t. Long loops are split among threads. This is compiled once for each N, in
/// elementwise_cpu.cpp, and not again for every function and dtype.
template <int N>
void for_each_run(const StridedLoop<N>& loop,
                  void (*run)(const void* closure, std::int64_t count, const std::int64_t* at), const void* closure);

}  // namespace detail

/// out[i] = f(in[i]...) over all elements, for up to 4 inputs. Inputs are Tensors, which broadcast to out's shape, or
/// numbers. Out and In are the element types; f sees 16-bit floats as float.
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
  const std::int64_t out_stride = loop.inner_stride(0);

  [&]<std::size_t... I>(std::index_sequence<I...>) {
    const std::tuple<detail::InputRun<In>...> inputs{
        detail::InputRun<In>(operands[I + 1], loop.inner_stride(static_cast<int>(I) + 1))...};
    const auto run = [&](std::int64_t count, const std::int64_t* at) {
      detail::elementwise_run<F, Out, In...>(f, count, out_data + at[0], out_stride,
                                             std::get<I>(inputs).from(at[I + 1])...);
    };
    detail::for_each_run<kInputs + 1>(
        loop,
        [](const void* closure, std::int64_t count, const std::int64_t* at) {
          (*static_cast<const decltype(run)*>(closure))(count, at);
        },
        &run);
  }
  (std::make_index_sequence<kInputs>());
}

}  // namespace mica

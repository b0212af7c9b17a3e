#pragma once

// Element-wise loops on the CPU; core/cuda/elementwise.cuh has the same function for CUDA.
//
// A function is compiled for the types that it computes in. 16-bit floats, and runs of few elements, are gathered into
// blocks of adjacent elements in the first-level cache by elementwise_cpu.cpp.

#include <array>
#include <concepts>
#include <utility>

#include <mica/core/detail/strided.h>
#include <mica/core/dispatch.h>
#include <mica/core/parallel.h>

namespace mica {

namespace detail {

// Computes n elements. `strides` are those of the outputs, then those of the inputs; 0 if an input is a single element.
using BlockFunction = void (*)(const void* f, std::int64_t n, void* const* out, const void* const* in,
                               const std::int64_t* strides);

template <class T, std::size_t>
using Repeat = T;

// Loops over types without vector instructions are not vectorized.
#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed"
#endif

// The BlockFunction of F. Strides of 1, and of 0 if there are one output and two inputs, are compile-time constants, so
// that the compiler vectorizes; for this, f must be inlined completely.
template <class F, class Out, class... In, std::size_t... K, std::size_t... I>
[[gnu::flatten]] void elementwise_block(std::index_sequence<K...>, std::index_sequence<I...>, const void* closure,
                                        std::int64_t n, void* const* outs, [[maybe_unused]] const void* const* in,
                                        const std::int64_t* strides) {
  constexpr int kOuts = sizeof...(K);
  const F f = *static_cast<const F*>(closure);
  if (((strides[K] == 1) && ...) && ((strides[kOuts + I] == 1) && ...)) {
    [f, n](Repeat<Out*, K>... out, const In*... data) {
      MICA_INDEPENDENT
      for (std::int64_t i = 0; i < n; ++i) {
        const auto returned = f(data[i]...);
        ((out[i] = static_cast<Out>(result_of(returned, static_cast<int>(K)))), ...);
      }
    }(static_cast<Out*>(outs[K])..., static_cast<const In*>(in[I])...);
    return;
  }
  Out* const out = static_cast<Out*>(outs[0]);
  if constexpr (kOuts == 1 && sizeof...(In) == 2) {
    const bool done = [&]<class A, class B>(const A* a, const B* b) {
      if (strides[0] == 1 && strides[1] == 0 && strides[2] == 1) {
        const A left = *a;
        MICA_INDEPENDENT
        for (std::int64_t i = 0; i < n; ++i) {
          out[i] = static_cast<Out>(f(left, b[i]));
        }
        return true;
      }
      if (strides[0] == 1 && strides[1] == 1 && strides[2] == 0) {
        const B right = *b;
        MICA_INDEPENDENT
        for (std::int64_t i = 0; i < n; ++i) {
          out[i] = static_cast<Out>(f(a[i], right));
        }
        return true;
      }
      return false;
    }(static_cast<const In*>(in[I])...);
    if (done) {
      return;
    }
  }
  for (std::int64_t i = 0; i < n; ++i) {
    const auto returned = f(static_cast<const In*>(in[I])[i * strides[kOuts + I]]...);
    ((static_cast<Out*>(outs[K])[i * strides[K]] = static_cast<Out>(result_of(returned, static_cast<int>(K)))), ...);
  }
}

#if defined(__clang__)
#pragma clang diagnostic pop
#endif

/// Calls `function` on all elements of N operands, the first kOuts of which are the outputs. Their dtypes must be
/// `dtypes`. `function` gets 16-bit floats as float. A null output is computed and discarded.
template <int N, int kOuts>
void for_each_block(const Shape& shape, const std::array<Operand, N>& operands, const std::array<DType, N>& dtypes,
                    BlockFunction function, const void* f);

}  // namespace detail

/// out[k][i] = f(in[i]...)[k] over all elements, for f that returns Results, or one number. A null output is not
/// written. All outputs have the same shape; inputs are Tensors, which broadcast to it, or numbers. At most 5 operands
/// (outputs and inputs). Out and In are the element types; f sees 16-bit floats as float.
template <class Out, class... In, class F, std::size_t kOuts, std::convertible_to<Operand>... T>
requires(sizeof...(In) == sizeof...(T)) void elementwise(Cpu, F f, const std::array<const Tensor*, kOuts>& outs,
                                                         const T&... in) {
  constexpr int kOperands = static_cast<int>(kOuts + sizeof...(In));
  const auto run = [](const void* closure, std::int64_t n, void* const* out_data, const void* const* in_data,
                      const std::int64_t* strides) {
    detail::elementwise_block<F, Accumulate<Out>, Accumulate<In>...>(
        std::make_index_sequence<kOuts>(), std::index_sequence_for<In...>(), closure, n, out_data, in_data, strides);
  };
  const auto operands = [&]<std::size_t... K>(std::index_sequence<K...>) {
    return std::array<Operand, kOperands>{Operand(outs[K])..., Operand(in)...};
  }
  (std::make_index_sequence<kOuts>());
  std::array<DType, kOperands> dtypes{};
  dtypes.fill(dtype_of<Out>);
  int t = kOuts;
  ((dtypes[t++] = dtype_of<In>), ...);
  detail::for_each_block<kOperands, static_cast<int>(kOuts)>(first_output(outs)->shape(), operands, dtypes, run, &f);
}

/// out[i] = f(in[i]...) over all elements.
template <class Out, class... In, class F, std::convertible_to<Operand>... T>
requires(sizeof...(In) == sizeof...(T)) void elementwise(Cpu device, F f, const Tensor& out, const T&... in) {
  elementwise<Out, In...>(device, f, std::array<const Tensor*, 1>{&out}, in...);
}

}  // namespace mica

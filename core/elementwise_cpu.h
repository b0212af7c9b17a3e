#pragma once

// Element-wise loops on the CPU; core/cuda/elementwise.cuh has the same function for CUDA. Included by *_cpu.cpp only.
//
// A function is compiled for the types that it computes in. 16-bit floats, and runs of few elements, are gathered into
// blocks of adjacent elements in the first-level cache by elementwise_cpu.cpp.

#include <array>
#include <concepts>
#include <utility>

#include <mica/core/dispatch.h>
#include <mica/core/parallel.h>
#include <mica/core/strided.h>

namespace mica {

namespace detail {

// Computes n elements. strides[0] is the output's stride, strides[1 + i] that of input i; 0 if the input is a single
// element.
using BlockFunction = void (*)(const void* f, std::int64_t n, void* out, const void* const* in,
                               const std::int64_t* strides);

// Loops over types without vector instructions are not vectorized.
#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed"
#endif

// The BlockFunction of F. Strides of 1, and of 0 if there are two inputs, are compile-time constants, so that the
// compiler vectorizes; for this, f must be inlined completely.
template <class F, class Out, class... In, std::size_t... I>
[[gnu::flatten]] void elementwise_block(std::index_sequence<I...>, const void* closure, std::int64_t n, void* out_data,
                                        [[maybe_unused]] const void* const* in, const std::int64_t* strides) {
  const F f = *static_cast<const F*>(closure);
  Out* const out = static_cast<Out*>(out_data);
  if (strides[0] == 1 && ((strides[I + 1] == 1) && ...)) {
    [f, n, out](const In*... data) {
      MICA_INDEPENDENT
      for (std::int64_t i = 0; i < n; ++i) {
        out[i] = static_cast<Out>(f(data[i]...));
      }
    }(static_cast<const In*>(in[I])...);
    return;
  }
  if constexpr (sizeof...(In) == 2) {
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
    out[i * strides[0]] = static_cast<Out>(f(static_cast<const In*>(in[I])[i * strides[I + 1]]...));
  }
}

#if defined(__clang__)
#pragma clang diagnostic pop
#endif

/// Calls `function` on all elements of the operands, the first of which is the output. Their dtypes must be `dtypes`.
/// `function` gets 16-bit floats as float.
template <int N>
void for_each_block(const std::array<Operand, N>& operands, const std::array<DType, N>& dtypes, BlockFunction function,
                    const void* f);

}  // namespace detail

/// out[i] = f(in[i]...) over all elements, for up to 4 inputs. Inputs are Tensors, which broadcast to out's shape, or
/// numbers. Out and In are the element types; f sees 16-bit floats as float.
template <class Out, class... In, class F, std::convertible_to<Operand>... T>
requires(sizeof...(In) == sizeof...(T)) void elementwise(Cpu, F f, const Tensor& out, const T&... in) {
  constexpr int kOperands = 1 + sizeof...(In);
  const auto run = [](const void* closure, std::int64_t n, void* out_data, const void* const* in_data,
                      const std::int64_t* strides) {
    detail::elementwise_block<F, Accumulate<Out>, Accumulate<In>...>(std::index_sequence_for<In...>(), closure, n,
                                                                     out_data, in_data, strides);
  };
  detail::for_each_block<kOperands>(std::array<Operand, kOperands>{Operand(out), Operand(in)...},
                                    std::array<DType, kOperands>{dtype_of<Out>, dtype_of<In>...}, run, &f);
}

}  // namespace mica

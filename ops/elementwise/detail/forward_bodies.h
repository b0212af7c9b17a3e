#pragma once

// Kernel bodies shared by both devices. A source file includes its device's elementwise() before this header.

#include <variant>

#include <mica/core/dispatch.h>
#include <mica/ops/elementwise/detail/forward_kernels.h>

namespace mica::kernels {

template <class On>
void forward_unary(On device, const ForwardUnary& function, const Tensor& y, const Tensor& x) {
  std::visit(
      [&]<class F>(const F& f) {
        on_dtype(typename F::Dtypes{}, x.dtype(), f.name, [&]<class T>() { elementwise<T, T>(device, f, y, x); });
      },
      function);
}

template <class On>
void forward_binary(On device, const ForwardBinary& function, const Tensor& out, const Operand& a, const Operand& b) {
  std::visit(
      [&]<class F>(const F& f) {
        on_dtype(typename F::Dtypes{}, out.dtype(), f.name,
                 [&]<class T>() { elementwise<T, T, T>(device, f, out, a, b); });
      },
      function);
}

}  // namespace mica::kernels

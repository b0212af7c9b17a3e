#pragma once

// Kernel bodies shared by both devices. A source file includes its device's elementwise() before this header and
// instantiates them.

#include <array>

#include <mica/ops/gated/detail/gated_kernels.h>

namespace mica::kernels {

template <class On>
void gated_forward(On device, const GatedFunction& function, const Tensor& y, const Tensor& gate, const Tensor& up) {
  std::visit(
      [&]<class F>(const F&) {
        on_dtype(FloatTypes{}, y.dtype(), "gated",
                 [&]<class T>() { elementwise<T, T, T>(device, functions::Gated<F, T>{}, y, gate, up); });
      },
      function);
}

template <class On>
void gated_backward(On device, const GatedFunction& function, const Tensor& dgate, const Tensor& dup, const Tensor& dy,
                    const Tensor& gate, const Tensor& up) {
  const std::array<const Tensor*, 2> out{dgate.defined() ? &dgate : nullptr, dup.defined() ? &dup : nullptr};
  std::visit(
      [&]<class F>(const F&) {
        on_dtype(FloatTypes{}, dy.dtype(), "gated", [&]<class T>() {
          elementwise<T, T, T, T>(device, functions::GatedGradient<F, T>{}, out, dy, gate, up);
        });
      },
      function);
}

}  // namespace mica::kernels

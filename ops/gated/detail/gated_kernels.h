#pragma once

#include <variant>

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>
#include <mica/ops/gated/detail/gated_functions.h>

namespace mica::kernels {

using GatedFunction = std::variant<functions::Silu, functions::Gelu, functions::GeluTanh>;

// Tensors of one shape, floating dtype and device. Outputs are new; tensors may have any strides. `On` is Cpu or Cuda.

/// y = f(gate) · up.
template <class On>
void gated_forward(On, const GatedFunction& f, const Tensor& y, const Tensor& gate, const Tensor& up);

/// dgate = dy · up · f′(gate), dup = dy · f(gate). Whichever is undefined is not needed; one is defined.
template <class On>
void gated_backward(On, const GatedFunction& f, const Tensor& dgate, const Tensor& dup, const Tensor& dy,
                    const Tensor& gate, const Tensor& up);

}  // namespace mica::kernels

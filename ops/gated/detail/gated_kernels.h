#pragma once

#include <variant>

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>
#include <mica/ops/gated/detail/gated_functions.h>

namespace mica::kernels {

using GatedFunction = std::variant<functions::Silu, functions::Gelu, functions::GeluTanh>;

// All tensors have the same shape, floating dtype and device, and any strides. Outputs share no memory with inputs.
// `On` is Cpu or Cuda.

/// y = f(gate) · up.
template <class On>
void gated_forward(On, const GatedFunction& f, const Tensor& y, const Tensor& gate, const Tensor& up);

/// dgate = dy · up · f′(gate), dup = dy · f(gate). One of the two may be undefined; it is then not computed.
template <class On>
void gated_backward(On, const GatedFunction& f, const Tensor& dgate, const Tensor& dup, const Tensor& dy,
                    const Tensor& gate, const Tensor& up);

}  // namespace mica::kernels

#pragma once

#include <mica/core/dispatch.h>
#include <mica/core/math.h>
#include <mica/core/tensor.h>

namespace custom {

/// y = silu(gate) · up, for any strides.
void swiglu_forward(mica::Cpu, const mica::Tensor& y, const mica::Tensor& gate, const mica::Tensor& up);
void swiglu_forward(mica::Cuda, const mica::Tensor& y, const mica::Tensor& gate, const mica::Tensor& up);

/// Writes dgate = dy · up · silu′(gate) and dup = dy · silu(gate), all contiguous.
struct SwigluBackward {
  mica::Tensor dy, gate, up, dgate, dup;
};
void swiglu_backward(mica::Cpu, const SwigluBackward& args);
void swiglu_backward(mica::Cuda, const SwigluBackward& args);

// The arithmetic of one element, written once for both devices: in float, or in double for float64.

struct SwigluValue {
  template <class S>
  MICA_HOST_DEVICE S operator()(S gate, S up) const {
    return gate * mica::math::sigmoid(gate) * up;
  }
};

template <class T>
MICA_HOST_DEVICE void swiglu_slopes(T dy, T gate, T up, T& dgate, T& dup) {
  const mica::Accumulate<T> g = gate, s = mica::math::sigmoid(g);
  dgate = static_cast<T>(dy * up * s * (1 + g * (1 - s)));
  dup = static_cast<T>(dy * g * s);
}

}  // namespace custom

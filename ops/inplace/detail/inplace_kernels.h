#pragma once

#include <mica/core/detail/strided.h>
#include <mica/core/detail/wrap.h>
#include <mica/core/dispatch.h>

namespace mica::kernels {

/// x += alpha · y; y broadcasts to x's shape.
void add_in_place(Cpu, const Tensor& x, const Tensor& y, double alpha);
void add_in_place(Cuda, const Tensor& x, const Tensor& y, double alpha);

/// x *= y; y broadcasts to x's shape.
void mul_in_place(Cpu, const Tensor& x, const Operand& y);
void mul_in_place(Cuda, const Tensor& x, const Operand& y);

/// The element functions of both, for both devices.
template <class T>
struct AddScaled {
  T alpha;
  MICA_HOST_DEVICE T operator()(T x, T y) const { return wrapping_add(x, wrapping_mul(alpha, y)); }
};

}  // namespace mica::kernels

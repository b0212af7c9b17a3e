#pragma once

#include <cstdint>
#include <variant>

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>
#include <mica/ops/gated/detail/gated_functions.h>

namespace mica::kernels {

using GatedFunction = std::variant<functions::gated::Silu, functions::gated::Gelu, functions::gated::GeluTanh>;

// Matrices (M, N) on the kernel's device, all of one dtype, M · N > 0. y and dy are contiguous; rows of gate, up and
// their gradients have a stride of `stride` elements.

/// y = f(gate) · up.
struct GatedForward {
  GatedFunction function;
  std::int64_t rows;     // M
  std::int64_t columns;  // N
  std::int64_t stride;
  const Tensor& gate;
  const Tensor& up;
  const Tensor& y;  // out
};

void gated_forward(Cpu, const GatedForward& args);
void gated_forward(Cuda, const GatedForward& args);

/// dgate = dy · up · f′(gate), dup = dy · f(gate).
struct GatedBackward {
  GatedFunction function;
  std::int64_t rows;
  std::int64_t columns;
  std::int64_t stride;
  const Tensor& dy;
  const Tensor& gate;
  const Tensor& up;
  const Tensor& dgate;  // out, or undefined: not needed
  const Tensor& dup;    // out, or undefined: not needed
};

void gated_backward(Cpu, const GatedBackward& args);
void gated_backward(Cuda, const GatedBackward& args);

}  // namespace mica::kernels

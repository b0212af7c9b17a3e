#pragma once

#include <variant>

#include <mica/core/strided.h>
#include <mica/ops/elementwise/functions.h>

namespace mica::kernels {

// Outputs are new and row-major; inputs broadcast to their shape and may have any strides. Numbers beside tensors
// reach the function in the type it computes in.

namespace detail {
using namespace functions;
using Unary =
    std::variant<Exp, Log, Sqrt, Rsqrt, Square, PowScalar, Tanh, Erf, Sigmoid, Relu, Silu, Gelu, GeluTanh, Abs, Clamp>;
using Binary = std::variant<Add, Sub, Mul, Div, Pow, Maximum, Minimum>;
using FusedBinary = std::variant<Pow, Maximum, Minimum>;
using Comparison = std::variant<Equal, NotEqual, Less, LessEqual>;
using Logical = std::variant<And, Or>;
}  // namespace detail

/// The differentiable functions of one argument, all for floating dtypes.
using UnaryFunction = detail::Unary;
using BinaryFunction = detail::Binary;
/// Those whose gradient has a kernel of its own.
using FusedBinaryFunction = detail::FusedBinary;
using Comparison = detail::Comparison;
using LogicalFunction = detail::Logical;

/// y = f(x).
void unary(Cpu, const UnaryFunction& f, const Tensor& y, const Tensor& x);
void unary(Cuda, const UnaryFunction& f, const Tensor& y, const Tensor& x);

/// dx = dy · f′, from `saved`, which is y or x as f.from_output says.
void unary_backward(Cpu, const UnaryFunction& f, const Tensor& dx, const Tensor& dy, const Tensor& saved);
void unary_backward(Cuda, const UnaryFunction& f, const Tensor& dx, const Tensor& dy, const Tensor& saved);

/// out = f(a, b).
void binary(Cpu, const BinaryFunction& f, const Tensor& out, const Operand& a, const Operand& b);
void binary(Cuda, const BinaryFunction& f, const Tensor& out, const Operand& a, const Operand& b);

enum class Argument { a, b };

/// dx = dy · ∂f/∂a or ∂f/∂b, of dy's shape: not yet summed over what was broadcast.
void binary_backward(Cpu, const FusedBinaryFunction& f, Argument by, const Tensor& dx, const Tensor& dy,
                     const Operand& a, const Operand& b);
void binary_backward(Cuda, const FusedBinaryFunction& f, Argument by, const Tensor& dx, const Tensor& dy,
                     const Operand& a, const Operand& b);

/// out (bool) = f(a, b), both of `dtype`.
void compare(Cpu, const Comparison& f, DType dtype, const Tensor& out, const Operand& a, const Operand& b);
void compare(Cuda, const Comparison& f, DType dtype, const Tensor& out, const Operand& a, const Operand& b);

/// Between bool tensors.
void logical(Cpu, const LogicalFunction& f, const Tensor& out, const Tensor& a, const Tensor& b);
void logical(Cuda, const LogicalFunction& f, const Tensor& out, const Tensor& a, const Tensor& b);
void logical_not(Cpu, const Tensor& out, const Tensor& a);
void logical_not(Cuda, const Tensor& out, const Tensor& a);

/// out = condition ? a : b.
void where(Cpu, const Tensor& out, const Tensor& condition, const Operand& a, const Operand& b);
void where(Cuda, const Tensor& out, const Tensor& condition, const Operand& a, const Operand& b);

}  // namespace mica::kernels

#pragma once

#include <variant>

#include <mica/core/detail/strided.h>
#include <mica/ops/elementwise/detail/functions.h>

namespace mica::kernels {

// Outputs are dense and, unless stated otherwise, share no memory with inputs. Inputs broadcast to the output's
// shape and may have any strides. Numbers are converted to the type of arithmetic. `On` is Cpu or Cuda.

namespace detail {
using namespace functions;  // NOLINT(google-build-using-namespace)
using Unary = std::variant<Exp, Log, Log1p, Expm1, Sin, Cos, Sqrt, Rsqrt, Square, PowScalar, Tanh, Erf, Sigmoid,
                           Softplus, Relu, LeakyRelu, Elu, Silu, Gelu, GeluTanh, Abs, Clamp, Floor, Ceil, Round>;
using Binary = std::variant<Add, Sub, Mul, Div, FloorDivide, Fmod, Pow, Maximum, Minimum>;
using FusedBinary = std::variant<Fmod, Pow, Maximum, Minimum>;
using Comparison = std::variant<Equal, NotEqual, Less, LessEqual>;
using Logical = std::variant<And, Or>;
}  // namespace detail

/// The differentiable functions of one argument, for floating dtypes.
using UnaryFunction = detail::Unary;
using BinaryFunction = detail::Binary;
/// Functions whose gradient has its own kernel.
using FusedBinaryFunction = detail::FusedBinary;
using Comparison = detail::Comparison;
using LogicalFunction = detail::Logical;

/// y = f(x). y may be x.
template <class On>
void unary(On, const UnaryFunction& f, const Tensor& y, const Tensor& x);

/// dx = dy · f′, where f′ is computed from `saved`: y if f.from_output, else x.
template <class On>
void unary_backward(On, const UnaryFunction& f, const Tensor& dx, const Tensor& dy, const Tensor& saved);

/// out = f(a, b).
template <class On>
void binary(On, const BinaryFunction& f, const Tensor& out, const Operand& a, const Operand& b);

enum class Argument { a, b };

/// dx = dy · ∂f/∂a or ∂f/∂b, of dy's shape: not yet summed over broadcast axes.
template <class On>
void binary_backward(On, const FusedBinaryFunction& f, Argument by, const Tensor& dx, const Tensor& dy,
                     const Operand& a, const Operand& b);

/// out (bool) = f(a, b) for a and b of `dtype`.
template <class On>
void compare(On, const Comparison& f, DType dtype, const Tensor& out, const Operand& a, const Operand& b);

/// out = f(a, b), for bool tensors.
template <class On>
void logical(On, const LogicalFunction& f, const Tensor& out, const Tensor& a, const Tensor& b);
template <class On>
void logical_not(On, const Tensor& out, const Tensor& a);

/// out = condition ? a : b.
template <class On>
void where(On, const Tensor& out, const Tensor& condition, const Operand& a, const Operand& b);

}  // namespace mica::kernels

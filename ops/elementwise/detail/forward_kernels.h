#pragma once

#include <variant>

#include <mica/core/detail/strided.h>
#include <mica/ops/elementwise/detail/forward_functions.h>

namespace mica::kernels {

// As in elementwise_kernels.h, for functions that have no kernels for their gradients.

using ForwardUnary = std::variant<functions::Tan, functions::Asin, functions::Acos, functions::Atan, functions::Sinh,
                                  functions::Cosh, functions::Asinh, functions::Acosh, functions::Atanh,
                                  functions::Trunc, functions::Sign, functions::BitNot>;
using ForwardBinary = std::variant<functions::Atan2, functions::BitAnd, functions::BitOr, functions::BitXor,
                                   functions::ShiftLeft, functions::ShiftRight>;

/// y = f(x).
template <class On>
void forward_unary(On, const ForwardUnary& f, const Tensor& y, const Tensor& x);

/// out = f(a, b).
template <class On>
void forward_binary(On, const ForwardBinary& f, const Tensor& out, const Operand& a, const Operand& b);

}  // namespace mica::kernels

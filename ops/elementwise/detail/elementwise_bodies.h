#pragma once

// Kernel bodies shared by both devices. A source file includes its device's elementwise() before this header and
// instantiates the kernels that it is named after.

#include <variant>

#include <mica/core/dispatch.h>
#include <mica/ops/elementwise/detail/elementwise_kernels.h>

namespace mica::kernels {

template <class On>
void unary(On device, const UnaryFunction& function, const Tensor& y, const Tensor& x) {
  std::visit(
      [&](const auto& f) {
        on_dtype(FloatTypes{}, x.dtype(), f.name, [&]<class T>() { elementwise<T, T>(device, f, y, x); });
      },
      function);
}

template <class On>
void unary_backward(On device, const UnaryFunction& function, const Tensor& dx, const Tensor& dy, const Tensor& saved) {
  std::visit(
      [&]<class F>(const F& f) {
        on_dtype(FloatTypes{}, dx.dtype(), f.name,
                 [&]<class T>() { elementwise<T, T, T>(device, functions::Backward<F>{f}, dx, dy, saved); });
      },
      function);
}

template <class On>
void binary(On device, const BinaryFunction& function, const Tensor& out, const Operand& a, const Operand& b) {
  std::visit(
      [&]<class F>(const F& f) {
        on_dtype(typename F::Dtypes{}, out.dtype(), f.name,
                 [&]<class T>() { elementwise<T, T, T>(device, f, out, a, b); });
      },
      function);
}

template <class On>
void binary_backward(On device, const FusedBinaryFunction& function, Argument by, const Tensor& dx, const Tensor& dy,
                     const Operand& a, const Operand& b) {
  std::visit(
      [&]<class F>(const F& f) {
        on_dtype(FloatTypes{}, dx.dtype(), f.name, [&]<class T>() {
          if (by == Argument::a) {
            elementwise<T, T, T, T>(device, functions::BackwardA<F>{f}, dx, dy, a, b);
          } else {
            elementwise<T, T, T, T>(device, functions::BackwardB<F>{f}, dx, dy, a, b);
          }
        });
      },
      function);
}

template <class On>
void compare(On device, const Comparison& comparison, DType dtype, const Tensor& out, const Operand& a,
             const Operand& b) {
  std::visit(
      [&](const auto& f) {
        on_dtype(AllTypes{}, dtype, "compare", [&]<class T>() { elementwise<bool, T, T>(device, f, out, a, b); });
      },
      comparison);
}

template <class On>
void logical(On device, const LogicalFunction& function, const Tensor& out, const Tensor& a, const Tensor& b) {
  std::visit([&](const auto& f) { elementwise<bool, bool, bool>(device, f, out, a, b); }, function);
}

template <class On>
void logical_not(On device, const Tensor& out, const Tensor& a) {
  elementwise<bool, bool>(device, functions::Not{}, out, a);
}

template <class On>
void where(On device, const Tensor& out, const Tensor& condition, const Operand& a, const Operand& b) {
  on_dtype(AllTypes{}, out.dtype(), "where",
           [&]<class T>() { elementwise<T, bool, T, T>(device, functions::Select{}, out, condition, a, b); });
}

}  // namespace mica::kernels

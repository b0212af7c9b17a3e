#include <mica/core/cuda/elementwise.cuh>
#include <mica/ops/elementwise/elementwise_kernels.h>

namespace mica::kernels {

void compare(Cuda device, const Comparison& comparison, DType dtype, const Tensor& out, const Operand& a,
             const Operand& b) {
  std::visit(
      [&](const auto& f) {
        on_dtype(AllTypes{}, dtype, "compare", [&]<class T>() { elementwise<bool, T, T>(device, f, out, a, b); });
      },
      comparison);
}

void logical(Cuda device, const LogicalFunction& function, const Tensor& out, const Tensor& a, const Tensor& b) {
  std::visit([&](const auto& f) { elementwise<bool, bool, bool>(device, f, out, a, b); }, function);
}

void logical_not(Cuda device, const Tensor& out, const Tensor& a) {
  elementwise<bool, bool>(device, functions::Not{}, out, a);
}

void where(Cuda device, const Tensor& out, const Tensor& condition, const Operand& a, const Operand& b) {
  on_dtype(AllTypes{}, out.dtype(), "where",
           [&]<class T>() { elementwise<T, bool, T, T>(device, functions::Select{}, out, condition, a, b); });
}

}  // namespace mica::kernels

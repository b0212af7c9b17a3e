#include <mica/core/cuda/elementwise.cuh>
#include <mica/ops/elementwise/detail/functions.h>
#include <mica/ops/inplace/detail/inplace_kernels.h>

namespace mica::kernels {

void add_in_place(Cuda device, const Tensor& x, const Tensor& y, double alpha) {
  on_dtype(NumericTypes{}, x.dtype(), "add_", [&]<class T>() {
    using A = Accumulate<T>;
    elementwise<T, T, T>(device, AddScaled<A>{static_cast<A>(alpha)}, x, x, y);
  });
}

void mul_in_place(Cuda device, const Tensor& x, const Operand& y) {
  on_dtype(NumericTypes{}, x.dtype(), "mul_",
           [&]<class T>() { elementwise<T, T, T>(device, functions::Mul{}, x, x, y); });
}

}  // namespace mica::kernels

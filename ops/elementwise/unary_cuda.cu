#include <mica/core/cuda/elementwise.cuh>
#include <mica/ops/elementwise/elementwise_kernels.h>

namespace mica::kernels {

void unary(Cuda device, const UnaryFunction& function, const Tensor& y, const Tensor& x) {
  std::visit(
      [&](const auto& f) {
        on_dtype(FloatTypes{}, x.dtype(), f.name, [&]<class T>() { elementwise<T, T>(device, f, y, x); });
      },
      function);
}

}  // namespace mica::kernels

#include <mica/core/cuda/elementwise.cuh>
#include <mica/ops/elementwise/elementwise_kernels.h>

namespace mica::kernels {

void unary_backward(Cuda device, const UnaryFunction& function, const Tensor& dx, const Tensor& dy,
                    const Tensor& saved) {
  std::visit(
      [&]<class F>(const F& f) {
        on_dtype(FloatTypes{}, dx.dtype(), f.name,
                 [&]<class T>() { elementwise<T, T, T>(device, functions::Backward<F>{f}, dx, dy, saved); });
      },
      function);
}

}  // namespace mica::kernels

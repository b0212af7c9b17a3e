#include <mica/core/elementwise_cpu.h>
#include <mica/ops/elementwise/elementwise_kernels.h>

namespace mica::kernels {

void binary(Cpu device, const BinaryFunction& function, const Tensor& out, const Operand& a, const Operand& b) {
  std::visit(
      [&]<class F>(const F& f) {
        on_dtype(typename F::Dtypes{}, out.dtype(), f.name,
                 [&]<class T>() { elementwise<T, T, T>(device, f, out, a, b); });
      },
      function);
}

void binary_backward(Cpu device, const FusedBinaryFunction& function, Argument by, const Tensor& dx, const Tensor& dy,
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

}  // namespace mica::kernels

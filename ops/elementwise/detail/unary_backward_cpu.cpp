#include <mica/core/elementwise_cpu.h>
#include <mica/ops/elementwise/detail/elementwise_bodies.h>

namespace mica::kernels {

template void unary_backward(Cpu, const UnaryFunction&, const Tensor&, const Tensor&, const Tensor&);

}  // namespace mica::kernels

#include <mica/core/elementwise_cpu.h>
#include <mica/ops/elementwise/detail/forward_bodies.h>

namespace mica::kernels {

template void forward_unary(Cpu, const ForwardUnary&, const Tensor&, const Tensor&);
template void forward_binary(Cpu, const ForwardBinary&, const Tensor&, const Operand&, const Operand&);

}  // namespace mica::kernels

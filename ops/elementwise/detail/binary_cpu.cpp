#include <mica/core/elementwise_cpu.h>
#include <mica/ops/elementwise/detail/elementwise_bodies.h>

namespace mica::kernels {

template void binary(Cpu, const BinaryFunction&, const Tensor&, const Operand&, const Operand&);
template void binary_backward(Cpu, const FusedBinaryFunction&, Argument, const Tensor&, const Tensor&, const Operand&,
                              const Operand&);

}  // namespace mica::kernels

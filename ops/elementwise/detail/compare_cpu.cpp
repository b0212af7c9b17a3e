#include <mica/core/elementwise_cpu.h>
#include <mica/ops/elementwise/detail/elementwise_bodies.h>

namespace mica::kernels {

template void compare(Cpu, const Comparison&, DType, const Tensor&, const Operand&, const Operand&);
template void logical(Cpu, const LogicalFunction&, const Tensor&, const Tensor&, const Tensor&);
template void logical_not(Cpu, const Tensor&, const Tensor&);
template void where(Cpu, const Tensor&, const Tensor&, const Operand&, const Operand&);

}  // namespace mica::kernels

#include <mica/core/cuda/elementwise.cuh>
#include <mica/ops/elementwise/detail/elementwise_bodies.h>

namespace mica::kernels {

template void compare(Cuda, const Comparison&, DType, const Tensor&, const Operand&, const Operand&);
template void logical(Cuda, const LogicalFunction&, const Tensor&, const Tensor&, const Tensor&);
template void logical_not(Cuda, const Tensor&, const Tensor&);
template void where(Cuda, const Tensor&, const Tensor&, const Operand&, const Operand&);

}  // namespace mica::kernels

#include <mica/core/cuda/elementwise.cuh>
#include <mica/ops/elementwise/detail/elementwise_bodies.h>

namespace mica::kernels {

template void binary(Cuda, const BinaryFunction&, const Tensor&, const Operand&, const Operand&);
template void binary_backward(Cuda, const FusedBinaryFunction&, Argument, const Tensor&, const Tensor&, const Operand&,
                              const Operand&);

}  // namespace mica::kernels

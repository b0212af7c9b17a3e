#include <mica/core/cuda/elementwise.cuh>
#include <mica/ops/elementwise/detail/forward_bodies.h>

namespace mica::kernels {

template void forward_unary(Cuda, const ForwardUnary&, const Tensor&, const Tensor&);
template void forward_binary(Cuda, const ForwardBinary&, const Tensor&, const Operand&, const Operand&);

}  // namespace mica::kernels

#include <mica/core/cuda/elementwise.cuh>
#include <mica/ops/elementwise/detail/elementwise_bodies.h>

namespace mica::kernels {

template void unary(Cuda, const UnaryFunction&, const Tensor&, const Tensor&);

}  // namespace mica::kernels

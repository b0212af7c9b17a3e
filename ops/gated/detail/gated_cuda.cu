#include <mica/core/cuda/elementwise.cuh>
#include <mica/ops/gated/detail/gated_bodies.h>

namespace mica::kernels {

template void gated_forward(Cuda, const GatedFunction&, const Tensor&, const Tensor&, const Tensor&);
template void gated_backward(Cuda, const GatedFunction&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                             const Tensor&);

}  // namespace mica::kernels

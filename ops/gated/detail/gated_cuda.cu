// Gated activations, by the kernel of core/cuda/elementwise.cuh:
//
//     forward     g, u ──> f(g) · u ──> y
//     backward    g, u, dy ──> dy · u · f'(g), dy · f(g) ──> dg, du

#include <mica/core/cuda/elementwise.cuh>
#include <mica/ops/gated/detail/gated_bodies.h>

namespace mica::kernels {

template void gated_forward(Cuda, const GatedFunction&, const Tensor&, const Tensor&, const Tensor&);
template void gated_backward(Cuda, const GatedFunction&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                             const Tensor&);

}  // namespace mica::kernels

#include <mica/core/elementwise_cpu.h>
#include <mica/ops/gated/detail/gated_bodies.h>

namespace mica::kernels {

template void gated_forward(Cpu, const GatedFunction&, const Tensor&, const Tensor&, const Tensor&);
template void gated_backward(Cpu, const GatedFunction&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                             const Tensor&);

}  // namespace mica::kernels

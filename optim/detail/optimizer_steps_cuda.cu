#include <mica/optim/detail/optimizer_step.cuh>

namespace mica::kernels {

template void optimizer_step<AdamWRule>(Cuda, const OptimizerStep&);
template void optimizer_step<AdamRule>(Cuda, const OptimizerStep&);
template void optimizer_step<LionRule>(Cuda, const OptimizerStep&);
template void optimizer_step<SgdRule>(Cuda, const OptimizerStep&);

}  // namespace mica::kernels

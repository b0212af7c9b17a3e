#include <mica/optim/detail/optimizer_step_cpu.h>

namespace mica::kernels {

template void optimizer_step<AdamWRule>(Cpu, const OptimizerStep&);
template void optimizer_step<AdamRule>(Cpu, const OptimizerStep&);
template void optimizer_step<LionRule>(Cpu, const OptimizerStep&);
template void optimizer_step<SgdRule>(Cpu, const OptimizerStep&);

}  // namespace mica::kernels

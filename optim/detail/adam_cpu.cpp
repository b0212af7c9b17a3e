#include <mica/optim/detail/adam_kernels.h>
#include <mica/optim/detail/multi_tensor_cpu.h>

namespace mica::kernels {

void adam_step(Cpu device, const OptimizerStep& step) { optimizer_step<AdamRule>(device, "adam_step", step); }

}  // namespace mica::kernels

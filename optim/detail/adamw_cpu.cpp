#include <mica/optim/detail/adamw_kernels.h>
#include <mica/optim/detail/multi_tensor_cpu.h>

namespace mica::kernels {

void adamw_step(Cpu device, const OptimizerStep& step) { optimizer_step<AdamWRule>(device, "adamw_step", step); }

}  // namespace mica::kernels

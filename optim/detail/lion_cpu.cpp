#include <mica/optim/detail/lion_kernels.h>
#include <mica/optim/detail/multi_tensor_cpu.h>

namespace mica::kernels {

void lion_step(Cpu device, const OptimizerStep& step) { optimizer_step<LionRule>(device, "lion_step", step); }

}  // namespace mica::kernels

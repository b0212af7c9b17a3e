#include <mica/optim/detail/adamw_kernels.h>
#include <mica/optim/detail/multi_tensor.cuh>

namespace mica::kernels {

void adamw_step(Cuda device, const OptimizerStep& step) { optimizer_step<AdamWRule>(device, "adamw_step", step); }

}  // namespace mica::kernels

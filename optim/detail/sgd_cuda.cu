#include <mica/optim/detail/multi_tensor.cuh>
#include <mica/optim/detail/sgd_kernels.h>

namespace mica::kernels {

void sgd_step(Cuda device, const OptimizerStep& step) { optimizer_step<SgdRule>(device, "sgd_step", step); }

}  // namespace mica::kernels

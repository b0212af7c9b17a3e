#include <mica/optim/adamw_kernels.h>
#include <mica/optim/update.cuh>

namespace mica::kernels {

void adamw_step(Cuda device, const AdamWStep& args) {
  update<AdamWRule>(device, args, "adamw_step", args.param, args.grad, args.exp_avg, args.exp_avg_sq);
}

}  // namespace mica::kernels

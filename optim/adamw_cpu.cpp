#include <mica/optim/adamw_kernels.h>
#include <mica/optim/update_cpu.h>

namespace mica::kernels {

void adamw_step(Cpu device, const AdamWStep& args) {
  update<AdamWRule>(device, args, "adamw_step", args.param, args.grad, args.exp_avg, args.exp_avg_sq);
}

}  // namespace mica::kernels

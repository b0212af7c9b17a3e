#include <mica/optim/detail/grad_scaler_kernels.h>

namespace mica::kernels {

void grad_scaler_update(Cpu, const GradScalerUpdate& args) {
  update_grad_scale(args.state.data<double>(), args.growth_factor, args.backoff_factor, args.growth_interval);
}

}  // namespace mica::kernels

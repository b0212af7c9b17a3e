#include <mica/optim/sgd_kernels.h>
#include <mica/optim/update.cuh>

namespace mica::kernels {

void sgd_step(Cuda device, const SgdStep& args) {
  if (args.momentum_buffer.defined()) {
    update<SgdRule>(device, args, "sgd_step", args.param, args.grad, args.momentum_buffer);
  } else {
    update<SgdRule>(device, args, "sgd_step", args.param, args.grad);
  }
}

}  // namespace mica::kernels

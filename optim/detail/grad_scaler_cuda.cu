#include <mica/core/cuda/error.h>
#include <mica/core/cuda/stream.h>
#include <mica/optim/detail/grad_scaler_kernels.h>

namespace mica::kernels {

namespace {

__global__ void grad_scaler_update_kernel(double* state, double growth_factor, double backoff_factor,
                                          double growth_interval) {
  update_grad_scale(state, growth_factor, backoff_factor, growth_interval);
}

}  // namespace

void grad_scaler_update(Cuda, const GradScalerUpdate& args) {
  grad_scaler_update_kernel<<<1, 1, 0, cuda::current_stream()>>>(args.state.data<double>(), args.growth_factor,
                                                                 args.backoff_factor, args.growth_interval);
  cuda::check_launch("grad_scaler_update_kernel");
}

}  // namespace mica::kernels

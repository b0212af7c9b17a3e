#include <mica/autograd/grad_mode.h>
#include <mica/core/creation.h>
#include <mica/core/dispatch.h>
#include <mica/ops/join/join.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/optim/detail/grad_norm.h>
#include <mica/optim/detail/grad_norm_kernels.h>

namespace mica::optim {

void start_norm(const std::vector<DeviceGradients*>& works, double max_norm, const Tensor& scaler) {
  constexpr std::int64_t kControlDoubles = sizeof(kernels::StepControl) / sizeof(double);
  const autograd::NoGrad guard;
  Tensors sums;
  for (DeviceGradients* const work : works) {
    const Device device = work->device;
    sums.push_back(empty({work->list.chunks()}, float64, device));
    work->norm = {.sums = sums.back(),
                  .max_norm = max_norm,
                  .scaler = scaler.defined() ? scaler.to(device) : Tensor{},
                  .norm = empty({}, float64, device),
                  .control = empty({kControlDoubles}, float64, device)};
    on_device(device, [&](auto d) { kernels::sums_of_squares(d, work->list, sums.back()); });
  }
  if (works.size() == 1) {
    return;
  }
  for (Tensor& of_device : sums) {
    of_device = sum(of_device);
  }
  for (DeviceGradients* const work : works) {  // each device needs the sums of all devices
    Tensors here;
    for (const Tensor& of_device : sums) {
      here.push_back(of_device.to(work->device));
    }
    work->norm.sums = stack(here);
  }
}

}  // namespace mica::optim

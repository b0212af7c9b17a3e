#include <mica/autograd/grad_mode.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/dispatch.h>
#include <mica/ops/join/join.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/optim/grad_norm.h>
#include <mica/optim/grad_norm_kernels.h>

namespace mica::optim {

Tensor grad_norm(const std::vector<DeviceGradients*>& works, double max_norm, const Tensor& scaler) {
  constexpr std::int64_t kControlDoubles = sizeof(kernels::StepControl) / sizeof(double);
  const autograd::NoGrad guard;
  Tensors sums;
  for (const DeviceGradients* work : works) {
    sums.push_back(empty({work->list.chunks()}, float64, work->device));
    on_device(work->device, [&](auto d) { kernels::sums_of_squares(d, work->list, sums.back()); });
  }
  if (works.size() > 1) {  // each device needs the sums of all
    for (Tensor& of_device : sums) {
      of_device = sum(of_device);
    }
  }
  Tensor norm;
  for (std::size_t i = 0; i < works.size(); ++i) {
    const Device device = works[i]->device;
    Tensor total = sums[i];
    if (works.size() > 1) {
      Tensors here;
      for (const Tensor& of_device : sums) {
        here.push_back(of_device.to(device));
      }
      total = stack(here);
    }
    const Tensor scaler_here = scaler.defined() ? scaler.to(device) : Tensor{};
    works[i]->control = empty({kControlDoubles}, float64, device);
    const kernels::GradNorm args{.sums = total,
                                 .max_norm = max_norm,
                                 .scaler = scaler_here,
                                 .norm = empty({}, float64, device),
                                 .control = works[i]->control};
    on_device(device, [&](auto d) { kernels::grad_norm(d, args); });
    if (i == 0) {
      norm = args.norm;
      if (scaler.defined() && !scaler_here.is_same(scaler)) {
        copy_into(scaler, scaler_here);
      }
    }
  }
  return norm;
}

}  // namespace mica::optim

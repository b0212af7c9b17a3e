#include <mica/core/dispatch.h>
#include <mica/optim/adam.h>
#include <mica/optim/detail/adam_scalars.h>
#include <mica/optim/detail/rules.h>

namespace mica::optim {

Adam::Adam(const Tensors& parameters, AdamOptions options) : Adam(std::vector<Group>{{parameters, options}}) {}

Adam::Adam(const std::vector<Group>& groups)
    : Optimizer("Adam", specs_of(groups, [](const AdamOptions& o) { return detail::adam_scalars("Adam", o); },
                                 {"exp_avg", "exp_avg_sq"})) {}

void Adam::run(Device device, const kernels::OptimizerStep& step) {
  on_device(device, [&](auto d) { kernels::optimizer_step<kernels::AdamRule>(d, step); });
}

}  // namespace mica::optim

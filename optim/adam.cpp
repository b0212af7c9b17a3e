#include <cmath>

#include <mica/core/dispatch.h>
#include <mica/optim/adam.h>
#include <mica/optim/detail/adam_kernels.h>

namespace mica::optim {

namespace {

std::vector<double> checked_scalars(const AdamOptions& o) {
  check_lr("Adam", o.lr);
  for (const double beta : o.betas) {
    check(beta >= 0 && beta < 1, "Adam: expected betas in [0, 1), got {} and {}", o.betas[0], o.betas[1]);
  }
  check(o.eps >= 0 && std::isfinite(o.eps), "Adam: expected eps >= 0, got {}", o.eps);
  check(o.weight_decay >= 0 && std::isfinite(o.weight_decay), "Adam: expected weight_decay >= 0, got {}",
        o.weight_decay);
  return {o.lr, o.betas[0], o.betas[1], o.eps, o.weight_decay};
}

}  // namespace

Adam::Adam(const Tensors& parameters, AdamOptions options) : Adam(std::vector<Group>{{parameters, options}}) {}

Adam::Adam(const std::vector<Group>& groups)
    : Optimizer("Adam", [&] {
        std::vector<GroupSpec> specs;
        specs.reserve(groups.size());
        for (const Group& group : groups) {
          specs.push_back({.parameters = group.parameters,
                           .scalars = checked_scalars(group.options),
                           .state_names = {"exp_avg", "exp_avg_sq"},
                           .master_weights = group.options.master_weights});
        }
        return specs;
      }()) {}

void Adam::run(Device device, const kernels::OptimizerStep& step) {
  on_device(device, [&](auto d) { kernels::adam_step(d, step); });
}

}  // namespace mica::optim

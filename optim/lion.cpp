#include <cmath>

#include <mica/core/dispatch.h>
#include <mica/optim/detail/lion_kernels.h>
#include <mica/optim/lion.h>

namespace mica::optim {

namespace {

std::vector<double> checked_scalars(const LionOptions& o) {
  check_lr("Lion", o.lr);
  for (const double beta : o.betas) {
    check(beta >= 0 && beta < 1, "Lion: expected betas in [0, 1), got {} and {}", o.betas[0], o.betas[1]);
  }
  check(o.weight_decay >= 0 && std::isfinite(o.weight_decay), "Lion: expected weight_decay >= 0, got {}",
        o.weight_decay);
  return {o.lr, o.betas[0], o.betas[1], o.weight_decay};
}

}  // namespace

Lion::Lion(const Tensors& parameters, LionOptions options) : Lion(std::vector<Group>{{parameters, options}}) {}

Lion::Lion(const std::vector<Group>& groups)
    : Optimizer("Lion", [&] {
        std::vector<GroupSpec> specs;
        specs.reserve(groups.size());
        for (const Group& group : groups) {
          specs.push_back({.parameters = group.parameters,
                           .scalars = checked_scalars(group.options),
                           .state_names = {"exp_avg"},
                           .master_weights = group.options.master_weights});
        }
        return specs;
      }()) {}

void Lion::run(Device device, const kernels::OptimizerStep& step) {
  on_device(device, [&](auto d) { kernels::lion_step(d, step); });
}

}  // namespace mica::optim

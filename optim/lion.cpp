#include <mica/core/dispatch.h>
#include <mica/optim/detail/rules.h>
#include <mica/optim/lion.h>

namespace mica::optim {

namespace {

std::vector<double> checked_scalars(const LionOptions& o) {
  check_lr("Lion", o.lr);
  check_betas("Lion", o.betas);
  check_weight_decay("Lion", o.weight_decay);
  return {o.lr, o.betas[0], o.betas[1], o.weight_decay};
}

}  // namespace

Lion::Lion(const Tensors& parameters, LionOptions options) : Lion(std::vector<Group>{{parameters, options}}) {}

Lion::Lion(const std::vector<Group>& groups) : Optimizer("Lion", specs_of(groups, checked_scalars, {"exp_avg"})) {}

void Lion::run(Device device, const kernels::OptimizerStep& step) {
  on_device(device, [&](auto d) { kernels::optimizer_step<kernels::LionRule>(d, step); });
}

}  // namespace mica::optim

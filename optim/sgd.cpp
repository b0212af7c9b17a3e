#include <cmath>

#include <mica/core/dispatch.h>
#include <mica/optim/detail/rules.h>
#include <mica/optim/sgd.h>

namespace mica::optim {

namespace {

std::vector<double> checked_scalars(const SGDOptions& o) {
  check_lr("SGD", o.lr);
  check(o.momentum >= 0 && std::isfinite(o.momentum), "SGD: expected momentum >= 0, got {}", o.momentum);
  check(std::isfinite(o.dampening), "SGD: expected a finite dampening, got {}", o.dampening);
  check_weight_decay("SGD", o.weight_decay);
  check(!o.nesterov || (o.momentum > 0 && o.dampening == 0),
        "SGD: nesterov needs momentum and no dampening, got momentum {} and dampening {}", o.momentum, o.dampening);
  return {o.lr, o.momentum, o.dampening, o.weight_decay, o.nesterov ? 1.0 : 0.0};
}

}  // namespace

SGD::SGD(const Tensors& parameters, SGDOptions options) : SGD(std::vector<Group>{{parameters, options}}) {}

SGD::SGD(const std::vector<Group>& groups)
    : Optimizer("SGD", [&] {
        std::vector<GroupSpec> specs;
        for (const Group& group : groups) {
          const bool momentum = group.options.momentum != 0;
          specs.push_back(
              {.parameters = group.parameters,
               .scalars = checked_scalars(group.options),
               .state_names = momentum ? std::vector<std::string>{"momentum_buffer"} : std::vector<std::string>{},
               .master_weights = group.options.master_weights});
        }
        return specs;
      }()) {}

void SGD::run(Device device, const kernels::OptimizerStep& step) {
  on_device(device, [&](auto d) { kernels::optimizer_step<kernels::SgdRule>(d, step); });
}

}  // namespace mica::optim

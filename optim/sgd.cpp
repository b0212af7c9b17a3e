#include <algorithm>

#include <mica/core/dispatch.h>
#include <mica/optim/sgd.h>
#include <mica/optim/sgd_kernels.h>

namespace mica::optim {

namespace {

std::vector<Tensors> parameters_of(const std::vector<SGD::Group>& groups) {
  std::vector<Tensors> result;
  for (const SGD::Group& group : groups) {
    result.push_back(group.parameters);
  }
  return result;
}

std::vector<std::string> state_names(const std::vector<SGD::Group>& groups) {
  const bool any_momentum =
      std::any_of(groups.begin(), groups.end(), [](const SGD::Group& group) { return group.options.momentum != 0; });
  return any_momentum ? std::vector<std::string>{"momentum_buffer"} : std::vector<std::string>{};
}

}  // namespace

SGD::SGD(const Tensors& parameters, SGDOptions options) : SGD(std::vector<Group>{{parameters, options}}) {}

SGD::SGD(const std::vector<Group>& groups) : Optimizer("SGD", parameters_of(groups), state_names(groups)) {
  for (const Group& group : groups) {
    const SGDOptions& o = group.options;
    check_lr("SGD", o.lr);
    check(o.momentum >= 0, "SGD: expected momentum >= 0, got {}", o.momentum);
    check(o.weight_decay >= 0, "SGD: expected weight_decay >= 0, got {}", o.weight_decay);
    check(!o.nesterov || (o.momentum > 0 && o.dampening == 0),
          "SGD: nesterov needs momentum and no dampening, got momentum {} and dampening {}", o.momentum, o.dampening);
    options_.push_back(o);
  }
}

void SGD::set_lr(std::size_t group, double lr) {
  check_lr("SGD", lr);
  options_.at(group).lr = lr;
}

void SGD::update(const Tensor& parameter, const Tensor& grad, const Tensors& states, std::int64_t step,
                 std::size_t group) {
  const SGDOptions& o = options_[group];
  const kernels::SgdStep args{.param = parameter,
                              .grad = grad,
                              .momentum_buffer = o.momentum != 0 ? states[0] : Tensor{},
                              .lr = o.lr,
                              .momentum = o.momentum,
                              .gain = step == 1 ? 1 : 1 - o.dampening,
                              .weight_decay = o.weight_decay,
                              .nesterov = o.nesterov};
  on_device(parameter.device(), [&](auto device) { kernels::sgd_step(device, args); });
}

}  // namespace mica::optim

#include <cmath>

#include <mica/core/dispatch.h>
#include <mica/optim/adamw.h>
#include <mica/optim/adamw_kernels.h>

namespace mica::optim {

namespace {

std::vector<Tensors> parameters_of(const std::vector<AdamW::Group>& groups) {
  std::vector<Tensors> result;
  for (const AdamW::Group& group : groups) {
    result.push_back(group.parameters);
  }
  return result;
}

}  // namespace

AdamW::AdamW(const Tensors& parameters, AdamWOptions options) : AdamW(std::vector<Group>{{parameters, options}}) {}

AdamW::AdamW(const std::vector<Group>& groups) : Optimizer("AdamW", parameters_of(groups), {"exp_avg", "exp_avg_sq"}) {
  for (const Group& group : groups) {
    const AdamWOptions& o = group.options;
    check_lr("AdamW", o.lr);
    for (const double beta : o.betas) {
      check(beta >= 0 && beta < 1, "AdamW: expected betas in [0, 1), got {} and {}", o.betas[0], o.betas[1]);
    }
    check(o.eps >= 0, "AdamW: expected eps >= 0, got {}", o.eps);
    check(o.weight_decay >= 0, "AdamW: expected weight_decay >= 0, got {}", o.weight_decay);
    options_.push_back(o);
  }
}

std::vector<AdamW::Group> AdamW::decay_matrices(const Tensors& parameters, AdamWOptions options) {
  Group decayed{{}, options}, others{{}, options};
  others.options.weight_decay = 0;
  for (const Tensor& parameter : parameters) {
    (parameter.dim() >= 2 ? decayed : others).parameters.push_back(parameter);
  }
  return {decayed, others};
}

void AdamW::set_lr(std::size_t group, double lr) {
  check_lr("AdamW", lr);
  options_.at(group).lr = lr;
}

void AdamW::update(const Tensor& parameter, const Tensor& grad, const Tensors& states, std::int64_t step,
                   std::size_t group) {
  const AdamWOptions& o = options_[group];
  const auto t = static_cast<double>(step);
  const kernels::AdamWStep args{.param = parameter,
                                .grad = grad,
                                .exp_avg = states[0],
                                .exp_avg_sq = states[1],
                                .lr = o.lr,
                                .beta1 = o.betas[0],
                                .beta2 = o.betas[1],
                                .eps = o.eps,
                                .weight_decay = o.weight_decay,
                                .correction1 = 1 - std::pow(o.betas[0], t),
                                .correction2 = 1 - std::pow(o.betas[1], t)};
  on_device(parameter.device(), [&](auto device) { kernels::adamw_step(device, args); });
}

}  // namespace mica::optim

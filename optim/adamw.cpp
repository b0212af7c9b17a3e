#include <cmath>

#include <mica/core/dispatch.h>
#include <mica/optim/adamw.h>
#include <mica/optim/detail/adamw_kernels.h>

namespace mica::optim {

namespace {

std::vector<double> checked_scalars(const AdamWOptions& o) {
  check_lr("AdamW", o.lr);
  for (const double beta : o.betas) {
    check(beta >= 0 && beta < 1, "AdamW: expected betas in [0, 1), got {} and {}", o.betas[0], o.betas[1]);
  }
  check(o.eps >= 0 && std::isfinite(o.eps), "AdamW: expected eps >= 0, got {}", o.eps);
  check(o.weight_decay >= 0 && std::isfinite(o.weight_decay), "AdamW: expected weight_decay >= 0, got {}",
        o.weight_decay);
  return {o.lr, o.betas[0], o.betas[1], o.eps, o.weight_decay};
}

}  // namespace

AdamW::AdamW(const Tensors& parameters, AdamWOptions options) : AdamW(std::vector<Group>{{parameters, options}}) {}

AdamW::AdamW(const std::vector<Group>& groups)
    : Optimizer("AdamW", [&] {
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

std::vector<AdamW::Group> AdamW::decay_matrices(const Tensors& parameters, AdamWOptions options) {
  Group decayed{{}, options}, others{{}, options};
  others.options.weight_decay = 0;
  for (const Tensor& parameter : parameters) {
    (parameter.dim() >= 2 ? decayed : others).parameters.push_back(parameter);
  }
  return {decayed, others};
}

void AdamW::run(Device device, const kernels::OptimizerStep& step) {
  on_device(device, [&](auto d) { kernels::adamw_step(d, step); });
}

}  // namespace mica::optim

#include <mica/core/dispatch.h>
#include <mica/optim/adamw.h>
#include <mica/optim/detail/adam_scalars.h>
#include <mica/optim/detail/rules.h>

namespace mica::optim {

AdamW::AdamW(const Tensors& parameters, AdamWOptions options) : AdamW(std::vector<Group>{{parameters, options}}) {}

AdamW::AdamW(const std::vector<Group>& groups) : AdamW("AdamW", groups) {}

AdamW::AdamW(const char* name, const std::vector<Group>& groups)
    : Optimizer(name, specs_of(groups, [&](const AdamWOptions& o) { return detail::adam_scalars(name, o); },
                               {"exp_avg", "exp_avg_sq"})) {}

std::vector<AdamW::Group> AdamW::decay_matrices(const Tensors& parameters, AdamWOptions options) {
  Group decayed{{}, options}, others{{}, options};
  others.options.weight_decay = 0;
  for (const Tensor& parameter : parameters) {
    (parameter.dim() >= 2 ? decayed : others).parameters.push_back(parameter);
  }
  return {decayed, others};
}

void AdamW::run(Device device, const kernels::OptimizerStep& step) {
  on_device(device, [&](auto d) { kernels::optimizer_step<kernels::AdamWRule>(d, step); });
}

}  // namespace mica::optim

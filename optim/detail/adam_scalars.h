#pragma once

#include <cmath>
#include <vector>

#include <mica/optim/optimizer.h>

namespace mica::optim::detail {

/// The options of Adam or AdamW as their kernels read them. Throws for one that is out of range.
template <class Options>
std::vector<double> adam_scalars(const char* optimizer, const Options& o) {
  check_lr(optimizer, o.lr);
  check_betas(optimizer, o.betas);
  check(o.eps >= 0 && std::isfinite(o.eps), "{}: expected eps >= 0, got {}", optimizer, o.eps);
  check_weight_decay(optimizer, o.weight_decay);
  return {o.lr, o.betas[0], o.betas[1], o.eps, o.weight_decay};
}

}  // namespace mica::optim::detail

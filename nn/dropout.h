#pragma once

#include <mica/nn/module.h>

namespace mica::nn {

/// In training mode, sets each element to 0 with probability p and scales the others by 1 / (1 − p); in evaluation
/// mode, returns x. See mica::dropout.
class Dropout : public Module {
 public:
  explicit Dropout(double p = 0.5);  ///< throws unless 0 ≤ p < 1

  Tensor operator()(const Tensor& x) const;

  double p;
};

}  // namespace mica::nn

#pragma once

#include <mica/nn/module.h>

namespace mica::nn {

/// In training, sets each element to 0 with probability p and scales the others by 1 / (1 − p); after eval(), gives
/// x back: see mica::dropout.
class Dropout : public Module {
 public:
  explicit Dropout(double p = 0.5);

  Tensor operator()(const Tensor& x) const;

  double p;
};

}  // namespace mica::nn

#pragma once

#include <vector>

#include <mica/optim/optimizer.h>

namespace mica::optim {

struct SGDOptions {
  double lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;       ///< requires momentum > 0 and dampening = 0
  bool master_weights = true;  ///< keep float32 copies of 16-bit parameters: see Optimizer
};

/// Stochastic gradient descent with momentum, as PyTorch defines it. With gradient g:
///
///     g ← g + weight_decay · θ
///     b ← momentum · b + (1 − dampening) g     at the first step b ← g
///     θ ← θ − lr · (b, with nesterov g + momentum · b, without momentum g)
class SGD : public Optimizer {
 public:
  struct Group {
    Tensors parameters;
    SGDOptions options;
  };

  explicit SGD(const Tensors& parameters, SGDOptions options = {});
  explicit SGD(const std::vector<Group>& groups);

 private:
  void run(Device device, const kernels::OptimizerStep& step) override;
};

}  // namespace mica::optim

#pragma once

#include <array>
#include <vector>

#include <mica/optim/optimizer.h>

namespace mica::optim {

struct LionOptions {
  double lr = 1e-4;  ///< every element moves by it at each step: 3 to 10 times less than AdamW's
  std::array<double, 2> betas = {0.9, 0.99};
  double weight_decay = 0;     ///< as AdamW's; with the smaller lr, 3 to 10 times as much
  bool master_weights = true;  ///< keep float32 copies of 16-bit parameters: see Optimizer
};

/// Lion (Chen et al., 2023, arXiv:2302.06675), which keeps one state for each parameter. With gradient g:
///
///     θ ← (1 − lr · weight_decay) θ − lr · sign(β₁ m + (1 − β₁) g)
///     m ← β₂ m + (1 − β₂) g
class Lion : public Optimizer {
 public:
  struct Group {
    Tensors parameters;
    LionOptions options;
  };

  explicit Lion(const Tensors& parameters, LionOptions options = {});
  explicit Lion(const std::vector<Group>& groups);

 private:
  void run(Device device, const kernels::OptimizerStep& step) override;
};

}  // namespace mica::optim

#pragma once

#include <array>
#include <vector>

#include <mica/optim/optimizer.h>

namespace mica::optim {

struct LionOptions {
  double lr = 1e-4;  ///< each element moves by ±lr per step; use 3 to 10 times less than for AdamW
  std::array<double, 2> betas = {0.9, 0.99};
  double weight_decay = 0;     ///< as in AdamW; use 3 to 10 times as much, since lr is smaller
  bool master_weights = true;  ///< keep float32 copies of 16-bit parameters: see Optimizer
};

/// Lion (Chen et al., 2023, arXiv:2302.06675). Its only state is the average m of the gradients. With gradient g:
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

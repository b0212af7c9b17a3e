#pragma once

#include <array>
#include <vector>

#include <mica/optim/optimizer.h>

namespace mica::optim {

struct AdamOptions {
  double lr = 1e-3;
  std::array<double, 2> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 0;     ///< L2 regularization: adds weight_decay · θ to the gradient, unlike AdamW
  bool master_weights = true;  ///< keep float32 copies of 16-bit parameters: see Optimizer
};

/// Adam (Kingma and Ba, 2015, arXiv:1412.6980). At step t, with gradient g:
///
///     g ← g + weight_decay · θ
///     m ← β₁ m + (1 − β₁) g        v ← β₂ v + (1 − β₂) g²
///     θ ← θ − lr · m / (1 − β₁ᵗ) / (√(v / (1 − β₂ᵗ)) + eps)
class Adam : public Optimizer {
 public:
  struct Group {
    Tensors parameters;
    AdamOptions options;
  };

  explicit Adam(const Tensors& parameters, AdamOptions options = {});
  explicit Adam(const std::vector<Group>& groups);

 private:
  void run(Device device, const kernels::OptimizerStep& step) override;
};

}  // namespace mica::optim

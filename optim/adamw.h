#pragma once

#include <array>
#include <vector>

#include <mica/optim/optimizer.h>

namespace mica::optim {

struct AdamWOptions {
  double lr = 1e-3;
  std::array<double, 2> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 0.01;
  bool master_weights = true;  ///< keep float32 copies of 16-bit parameters: see Optimizer
};

/// Adam with decoupled weight decay (Loshchilov and Hutter, 2019). At step t, with gradient g:
///
///     m ← β₁ m + (1 − β₁) g        v ← β₂ v + (1 − β₂) g²
///     θ ← (1 − lr · weight_decay) θ − lr · m / (1 − β₁ᵗ) / (√(v / (1 − β₂ᵗ)) + eps)
class AdamW : public Optimizer {
 public:
  struct Group {
    Tensors parameters;
    AdamWOptions options;
  };

  explicit AdamW(const Tensors& parameters, AdamWOptions options = {});
  explicit AdamW(const std::vector<Group>& groups);

  /// Two groups, as is common for transformers: weight decay applies to parameters with two or more axes, but not to
  /// biases and the weights of norms.
  static std::vector<Group> decay_matrices(const Tensors& parameters, AdamWOptions options);

 protected:
  /// Error messages start with `name`.
  AdamW(const char* name, const std::vector<Group>& groups);

 private:
  void run(Device device, const kernels::OptimizerStep& step) override;
};

}  // namespace mica::optim

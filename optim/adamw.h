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

  /// Two groups, as transformers are trained: matrices (and whatever has two axes or more) decay, biases and the
  /// weights of norms do not.
  static std::vector<Group> decay_matrices(const Tensors& parameters, AdamWOptions options);

  using Optimizer::set_lr;
  void set_lr(std::size_t group, double lr) override;
  double lr(std::size_t group = 0) const override { return options_.at(group).lr; }

 private:
  void update(const Tensor& parameter, const Tensor& grad, const Tensors& states, std::int64_t step,
              std::size_t group) override;

  std::vector<AdamWOptions> options_;
};

}  // namespace mica::optim

#pragma once

#include <cstddef>
#include <memory>

#include "examples/train_transformer/options.h"
#include <mica/dist/group.h>
#include <mica/nn/gpt.h>
#include <mica/optim/optimizer.h>

/// AdamW of the ranks of a group: each computes gradients of its rows, and all take one step with their mean. The ranks
/// must call the same functions.
class GroupOptimizer {
 public:
  virtual ~GroupOptimizer() = default;

  /// loss.backward(gradient). `last`: of the backward passes before a step, after which gradients are averaged.
  virtual void backward(const mica::Tensor& loss, const mica::Tensor& gradient, bool last) = 0;
  /// See optim::Optimizer.
  virtual mica::Tensor step(const mica::optim::StepOptions& options) = 0;
  virtual void zero_grad() = 0;
  virtual void set_lr(double lr) = 0;

  /// On rank 0 that of optim::AdamW, for any number of ranks.
  virtual mica::StateDict state_dict() const = 0;
  /// The same on each rank.
  virtual void load_state_dict(const mica::StateDict& state) = 0;
  /// What this rank keeps.
  virtual std::size_t state_bytes() const = 0;
};

/// Each rank updates all weights; with --zero, its share of them. The weights become those of rank 0.
std::unique_ptr<GroupOptimizer> group_optimizer(mica::nn::GPT& model, const Options& options,
                                                const mica::dist::Group& group);

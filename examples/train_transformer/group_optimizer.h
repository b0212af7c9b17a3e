#pragma once

#include <cstddef>
#include <memory>

#include "examples/train_transformer/options.h"
#include <mica/dist/group.h>
#include <mica/nn/gpt.h>
#include <mica/optim/optimizer.h>

/// AdamW for a group of ranks: each computes the gradients of its rows, and all take the same step with the mean. All
/// ranks must call the same functions.
class GroupOptimizer {
 public:
  virtual ~GroupOptimizer() = default;

  /// Calls loss.backward(gradient). `last`: whether it is the last backward before a step, after which gradients are
  /// averaged.
  virtual void backward(const mica::Tensor& loss, const mica::Tensor& gradient, bool last) = 0;
  /// See optim::Optimizer.
  virtual mica::Tensor step(const mica::optim::StepOptions& options) = 0;
  virtual void zero_grad() = 0;
  virtual void set_lr(double lr) = 0;

  /// On rank 0 in the format of optim::AdamW, readable by any number of ranks.
  virtual mica::StateDict state_dict() const = 0;
  /// The same on each rank.
  virtual void load_state_dict(const mica::StateDict& state) = 0;
  /// The bytes of state on this rank.
  virtual std::size_t state_bytes() const = 0;
};

/// Each rank updates all weights, or with --zero its share of them. All ranks get the weights of rank 0.
std::unique_ptr<GroupOptimizer> group_optimizer(mica::nn::GPT& model, const Options& options,
                                                const mica::dist::Group& group);

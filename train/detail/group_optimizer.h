#pragma once

#include <cstddef>
#include <memory>

#include <mica/distributed/data_parallel.h>
#include <mica/distributed/sharded_adamw.h>
#include <mica/optim/optimizer.h>

namespace mica::train::detail {

/// An optimizer for a group of ranks: each computes the gradients of its part of a batch, and all take the same step
/// with the mean. All ranks must call the same functions.
class GroupOptimizer {
 public:
  virtual ~GroupOptimizer() = default;

  /// Calls loss.backward(gradient). `last`: whether it is the last backward before a step, after which gradients are
  /// averaged.
  virtual void backward(const Tensor& loss, const Tensor& gradient, bool last) = 0;
  /// See optim::Optimizer.
  virtual Tensor step(const optim::StepOptions& options) = 0;
  virtual void zero_grad() = 0;
  /// Forgets the backward of a step that failed on all ranks. Does not communicate.
  virtual void discard() = 0;
  virtual void set_lr(double lr) = 0;
  virtual double lr() const = 0;

  /// On rank 0 in the format of optim::Optimizer, readable by any number of ranks.
  virtual StateDict state_dict() const = 0;
  /// The same on each rank.
  virtual void load_state_dict(const StateDict& state) = 0;
  /// The bytes of state on this rank.
  virtual std::size_t state_bytes() const = 0;
};

/// Each rank updates all weights. The optimizer must outlive the result.
std::unique_ptr<GroupOptimizer> group_optimizer(optim::Optimizer& optimizer, const nn::Module& model,
                                                const distributed::DataParallelOptions& options,
                                                const distributed::Group& group);

/// Each rank updates its part of the weights. The optimizer must outlive the result.
std::unique_ptr<GroupOptimizer> group_optimizer(distributed::ShardedAdamW& optimizer);

}  // namespace mica::train::detail

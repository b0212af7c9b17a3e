#pragma once

#include <string>
#include <vector>

#include <mica/core/tensor.h>
#include <mica/nn/state_dict.h>

namespace mica::optim {

/// What all optimizers share: groups of parameters, each with options of its own, and the tensors that an optimizer
/// keeps for each parameter.
///
/// Those are made at a parameter's first step, in float32 (float64 for float64 parameters), and follow the parameter
/// when it moves to another device or dtype. 16-bit parameters are updated in float32 and rounded to nearest: steps
/// below half a unit in the last place are lost.
class Optimizer {
 public:
  virtual ~Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  /// Updates in place every parameter that has a gradient and passes over the others. Nothing is recorded.
  void step();
  /// Removes the gradients of all parameters.
  void zero_grad();

  /// Sets the learning rate of all groups, or of one.
  void set_lr(double lr);
  virtual void set_lr(std::size_t group, double lr) = 0;
  virtual double lr(std::size_t group = 0) const = 0;
  std::size_t group_count() const { return group_count_; }

  /// All parameters, in the order of the groups.
  Tensors parameters() const;

  /// What is kept for parameter i: "state.i.step", an int64 scalar, and "state.i.NAME" for each tensor. Handles, not
  /// copies. Options are not part of it.
  StateDict state_dict() const;
  /// Takes copies of the tensors of `state`; parameters it does not mention start anew. Throws one Error that says
  /// what does not fit, and then changes nothing.
  void load_state_dict(const StateDict& state);

 protected:
  /// `state_names` are the tensors kept for each parameter. `name` starts the errors.
  Optimizer(const char* name, const std::vector<Tensors>& groups, std::vector<std::string> state_names);

  /// One parameter's step. All tensors are row-major and on one device, grad has the parameter's dtype, `states` are
  /// those of state_names in order, zero before the first step; `step` counts from 1.
  virtual void update(const Tensor& parameter, const Tensor& grad, const Tensors& states, std::int64_t step,
                      std::size_t group) = 0;

 private:
  struct Slot {
    Tensor parameter;
    std::size_t group = 0;
    std::int64_t step = 0;
    Tensors states;
  };

  const char* name_;
  std::size_t group_count_;
  std::vector<std::string> state_names_;
  std::vector<Slot> slots_;
};

/// Throws unless lr is finite and not negative.
void check_lr(const char* optimizer, double lr);

}  // namespace mica::optim

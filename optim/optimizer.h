#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <mica/core/tensor.h>
#include <mica/nn/state_dict.h>

namespace mica::kernels {
struct OptimizerStep;
}

namespace mica::optim {

class GradScaler;

/// What one step does besides the update. None of it waits for the device.
struct StepOptions {
  /// Clips: if the norm of all gradients as one vector, (Σ g²)^½, is larger, every gradient g counts as
  /// g · max_grad_norm / (norm + 1e-6). The update scales them as it reads them; grad() keeps what it has. Infinity
  /// only computes the norm.
  std::optional<double> max_grad_norm{};
  /// For gradients of a loss that this scaler has scaled: they count unscaled, and if one of them is not finite, the
  /// step changes nothing. It must outlive the step.
  GradScaler* scaler = nullptr;
};

/// What all optimizers share: groups of parameters, each with options of its own, and the tensors that an optimizer
/// keeps for each parameter.
///
/// Those are made at a parameter's first step, in float32 (float64 for float64 parameters), and follow the parameter
/// when it moves to another device or dtype. A step updates all parameters of a device and dtype in one launch, and
/// reads learning rates, step counts and the norm on the device, so that a CUDA graph can capture it: step() and
/// set_lr() then act on every replay.
///
/// 16-bit parameters have float32 master weights (unless the options say no): the step updates those and rounds the
/// result into the parameter, so that updates below half a unit in its last place add up instead of being lost.
/// Elements of a parameter that somebody else has changed since the last step are taken over into the master weights.
///
/// Gradients have the parameter's dtype. Backward sums a 16-bit gradient in float32 and rounds it once, but adding the
/// gradients of several backward passes up in `grad` rounds each time: to accumulate many, keep parameters in float32
/// and use autograd::Autocast.
class Optimizer {
 public:
  virtual ~Optimizer();
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  /// Updates in place every parameter that has a gradient and passes over the others. Nothing is recorded.
  ///
  /// Returns the norm of the gradients before clipping (unscaled, with a scaler): a float64 scalar on the device of the
  /// first parameter that has a gradient; undefined with neither max_grad_norm nor scaler. Sums are in float64 and in
  /// an order that depends on the shapes alone. item() of it waits for the device, step() does not, unless the
  /// parameters are on several devices.
  Tensor step(const StepOptions& options = {});
  /// Removes the gradients of all parameters.
  void zero_grad();

  /// Sets the learning rate of all groups, or of one. Throws unless group < group_count().
  void set_lr(double lr);
  void set_lr(std::size_t group, double lr);
  double lr(std::size_t group = 0) const;
  std::size_t group_count() const { return groups_.size(); }

  /// All parameters, in the order of the groups.
  Tensors parameters() const;

  /// What is kept for parameter i: "state.i.step", an int64 scalar, "state.i.NAME" for each tensor, and
  /// "state.i.master" for master weights. Handles, not copies. Options are not part of it. Waits for the device.
  StateDict state_dict() const;
  /// Takes copies of the tensors of `state`; parameters it does not mention start anew. Master weights may be missing,
  /// and are left out where the parameter needs none. Throws one Error that says what does not fit, and then changes
  /// nothing.
  void load_state_dict(const StateDict& state);

 protected:
  struct GroupSpec {
    Tensors parameters;
    std::vector<double> scalars;           ///< the options as the kernels read them; the learning rate comes first
    std::vector<std::string> state_names;  ///< of the tensors kept for each parameter
    bool master_weights = true;            ///< for 16-bit parameters
  };

  /// `name` starts the errors. All groups have equally many scalars.
  Optimizer(const char* name, const std::vector<GroupSpec>& groups);

  /// The step of the parameters of one device.
  virtual void run(Device device, const kernels::OptimizerStep& step) = 0;

 private:
  struct Group {
    std::vector<std::string> state_names;
    bool master_weights;
  };
  struct Slot;
  struct OnDevice;
  struct Work;

  void check_gradients() const;
  void make_states(Slot& slot);
  OnDevice& counts_on(Device device);
  void collect_counts() const;
  std::vector<Work> collect_work();

  const char* name_;
  std::vector<Group> groups_;
  std::vector<Slot> slots_;
  std::shared_ptr<std::vector<double>> scalars_;  // of all groups; replays of captured steps read it
  std::size_t scalars_of_group_;
  std::vector<OnDevice> on_device_;
};

/// Throws unless lr is finite and not negative.
void check_lr(const char* optimizer, double lr);

}  // namespace mica::optim

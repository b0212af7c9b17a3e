#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <mica/core/state_dict.h>
#include <mica/core/tensor.h>

namespace mica::kernels {
struct OptimizerStep;
}

namespace mica::optim {

class GradScaler;

/// Options of one step. None of them makes step() wait for the device.
struct StepOptions {
  /// Clips: if the norm of all gradients as one vector, (Σ g²)^½, is larger, the step uses g · max_grad_norm / (norm +
  /// 1e-6) for every gradient g. The update scales gradients as it reads them; grad() is unchanged. Infinity only
  /// computes the norm.
  std::optional<double> max_grad_norm{};
  /// For gradients of a loss scaled by this scaler: the step unscales them, and changes nothing if one of them is not
  /// finite. The scaler must outlive the step.
  GradScaler* scaler = nullptr;
};

/// Base class of all optimizers: holds groups of parameters, each group with its own options, and the state tensors of
/// each parameter.
///
/// States are created at a parameter's first step, in float32 (float64 for float64 parameters), and follow the
/// parameter to another device or dtype. A step updates all parameters of a device and dtype in one launch, and reads
/// learning rates, step counts and the norm on the device, so that a CUDA graph can capture it: step() and set_lr()
/// then act on every replay.
///
/// 16-bit parameters have float32 master weights (unless the options disable them): the step updates these and rounds
/// the result into the parameter, so that updates below half a unit in its last place accumulate instead of being lost.
/// Elements of a parameter that anything else has changed since the last step are copied to the master weights.
///
/// Gradients have the parameter's dtype. Backward sums a 16-bit gradient in float32 and rounds it once, but
/// accumulating several backward passes in `grad` rounds each time: to accumulate many, keep parameters in float32 and
/// use autograd::Autocast. Constructors throw for options out of range, for parameters that are not leaves that require
/// a gradient, and for parameters that are listed twice or share elements.
class Optimizer {
 public:
  virtual ~Optimizer();
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  /// Updates in place every parameter that has a gradient; others are unchanged. Nothing is recorded. Throws, changing
  /// nothing, while such a parameter holds the average of an Ema, and with a scaler if clip_grad_norm_ has clipped a
  /// gradient, which is still scaled.
  ///
  /// Returns the norm of the gradients before clipping (unscaled, with a scaler): a float64 scalar on the device of the
  /// first parameter that has a gradient; undefined with neither max_grad_norm nor scaler. Sums are in float64, in an
  /// order that depends on the shapes alone. Its item() waits for the device; step() does not, unless the parameters
  /// are on several devices.
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

  /// The states of parameter i: "state.i.step", an int64 scalar, "state.i.NAME" for each tensor, and "state.i.master"
  /// for master weights. Handles, not copies. Options are not part of it. Waits for the device.
  StateDict state_dict() const;
  /// Copies the tensors of `state`; states of parameters not in it are reset. Master weights may be missing, and
  /// are ignored if the parameter needs none. Throws one Error that describes any mismatch, without changing
  /// anything.
  void load_state_dict(const StateDict& state);

 protected:
  struct GroupSpec {
    Tensors parameters;
    std::vector<double> scalars;           ///< the options as the kernels read them; the learning rate comes first
    std::vector<std::string> state_names;  ///< of the tensors kept for each parameter
    bool master_weights = true;            ///< for 16-bit parameters
  };

  /// A spec for each group: its scalars are scalars_of(options), and all have the same states.
  template <class Group, class ScalarsOf>
  static std::vector<GroupSpec> specs_of(const std::vector<Group>& groups, const ScalarsOf& scalars_of,
                                         const std::vector<std::string>& state_names) {
    std::vector<GroupSpec> specs;
    specs.reserve(groups.size());
    for (const Group& group : groups) {
      specs.push_back({.parameters = group.parameters,
                       .scalars = scalars_of(group.options),
                       .state_names = state_names,
                       .master_weights = group.options.master_weights});
    }
    return specs;
  }

  /// Error messages start with `name`. All groups have the same number of scalars.
  Optimizer(const char* name, const std::vector<GroupSpec>& groups);

  /// Updates the parameters of one device.
  virtual void run(Device device, const kernels::OptimizerStep& step) = 0;

  /// Takes the sums of squares of the parameters' gradients, (n) float64 on one device, and returns those that the norm
  /// is computed from. An optimizer that has only a part of the parameters adds the sums of the other parts. Called
  /// once for each device, by each step that needs the norm.
  virtual Tensor sums_of_all_squares(const Tensor& sums) { return sums; }

 private:
  struct Group {
    std::vector<std::string> state_names;
    bool master_weights;
  };
  struct ParameterState;
  struct OnDevice;
  struct Work;

  void check_gradients() const;
  void make_states(ParameterState& own);
  OnDevice& counts_on(Device device);
  void collect_counts() const;
  std::vector<Work> collect_work();

  const char* name_;
  std::vector<Group> groups_;
  std::vector<ParameterState> states_;
  std::shared_ptr<std::vector<double>> scalars_;  // of all groups; replays of captured steps read it
  std::size_t scalars_of_group_;
  std::vector<OnDevice> on_device_;
};

/// Throws unless lr is finite and not negative.
void check_lr(const char* optimizer, double lr);
/// Throws unless both are in [0, 1).
void check_betas(const char* optimizer, const std::array<double, 2>& betas);
/// Throws unless weight_decay is finite and not negative.
void check_weight_decay(const char* optimizer, double weight_decay);

}  // namespace mica::optim

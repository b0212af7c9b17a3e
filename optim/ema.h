#pragma once

#include <mica/core/tensor.h>
#include <mica/nn/state_dict.h>

namespace mica::optim {

/// Exponential moving averages of parameters, which often generalize better than the last ones (Polyak and Juditsky,
/// 1992, doi:10.1137/0330046). They start as copies of the parameters. Call update() after each step of the optimizer:
///
///     average ← average + (1 − decay) (parameter − average)
///
/// Averages are float32 (float64 for float64 parameters), since 16 bits would lose most updates. To evaluate with them:
///
///     optim::Ema ema(model.parameters(), 0.999);
///     …
///     ema.swap();  // the model has the averages
///     evaluate(model);
///     ema.swap();  // and its own weights again
class Ema {
 public:
  /// Throws unless 0 ≤ decay < 1, and if a parameter is not floating or is listed twice.
  explicit Ema(const Tensors& parameters, double decay = 0.999);

  /// Updates the averages with the current parameters. Throws while is_swapped().
  void update();

  /// Exchanges the values of parameters and averages in place. A second call restores the parameters exactly; in
  /// between, a 16-bit parameter holds its rounded average.
  void swap();
  /// True after an odd number of calls of swap().
  bool is_swapped() const { return !kept_.empty(); }

  /// In the order of the parameters. Handles, not copies.
  const Tensors& averages() const { return averages_; }

  double decay() const { return decay_; }

  /// "average.i" for each parameter. Handles, not copies.
  StateDict state_dict() const;
  /// Copies the averages of `state`. Throws one Error that describes any mismatch, without changing anything.
  void load_state_dict(const StateDict& state);

 private:
  Tensors parameters_;
  Tensors averages_;
  Tensors kept_;  // the parameters' own values while they have the averages
  double decay_;
};

}  // namespace mica::optim

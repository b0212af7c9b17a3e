#pragma once

#include <cstdint>
#include <vector>

#include <mica/core/state_dict.h>
#include <mica/core/storage.h>
#include <mica/core/tensor.h>

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
///
/// While the parameters have the averages, an optimizer's step throws: it would be lost. So does a swap back after any
/// other write to them. An Ema that is destroyed meanwhile leaves the averages in the parameters.
class Ema {
 public:
  /// Throws unless 0 ≤ decay < 1, and if a parameter is not floating or is listed twice.
  explicit Ema(const Tensors& parameters, double decay = 0.999);
  ~Ema();
  Ema(const Ema&) = delete;
  Ema& operator=(const Ema&) = delete;

  /// Updates the averages with the current parameters. Throws while is_swapped().
  void update();

  /// Exchanges the values of parameters and averages in place. A second call restores the parameters exactly; in
  /// between, a 16-bit parameter holds its rounded average. The second call throws, changing nothing, if a parameter
  /// was written in between.
  void swap();
  /// True after an odd number of calls of swap().
  bool is_swapped() const { return !kept_.empty(); }

  /// In the order of the parameters. Handles, not copies.
  const Tensors& averages() const { return averages_; }

  double decay() const { return decay_; }

  /// "average.i" for each parameter. Handles, not copies.
  StateDict state_dict() const;
  /// Copies the averages of `state`. Throws one Error that describes any mismatch, without changing anything. Throws
  /// while is_swapped().
  void load_state_dict(const StateDict& state);

 private:
  void check_not_written() const;

  Tensors parameters_;
  Tensors averages_;
  /// A parameter's own value while it has the average.
  struct Kept {
    Tensor value;
    const Storage* written = nullptr;  // where the average was written,
    std::uint32_t version = 0;         // … and the version after that
  };
  std::vector<Kept> kept_;
  double decay_;
};

}  // namespace mica::optim

#pragma once

#include <utility>

#include <mica/autograd/grad_mode.h>

namespace mica::nn {

/// Until the end of scope, all modules compute on this thread as after eval(), without dropout, and nothing is
/// recorded:
///
///     {
///       const nn::Evaluation guard;
///       loss = model.loss(inputs, targets);
///     }
///
/// No module changes: is_training() is false on this thread only, so other threads may train the same model, and
/// afterwards each module has its own mode.
class Evaluation {
 public:
  Evaluation() : previous_(std::exchange(on_, true)) {}
  ~Evaluation() { on_ = previous_; }
  Evaluation(const Evaluation&) = delete;
  Evaluation& operator=(const Evaluation&) = delete;

  /// Whether this thread has such a guard.
  static bool is_on() { return on_; }

 private:
  static inline thread_local constinit bool on_ = false;
  autograd::NoGrad no_grad_;  // also reports guards that end out of order
  bool previous_;
};

}  // namespace mica::nn

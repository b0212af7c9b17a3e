#pragma once

#include <mica/autograd/thread_state.h>

namespace mica::autograd {

/// While it lives, this thread looks for the origin of NaN and infinite gradients: `autograd::DetectAnomaly guard;`.
///
/// Each op that is recorded remembers from where it was called, and backward() and grad() look at every gradient on its
/// way. The first that is not finite raises an Error that names the op whose backward made it from finite ones, for
/// which input (with the parameter's name, if a module registered it), the module it ran in and the functions that
/// called it; and whether something that the op had saved in forward was not finite already. Gradients that were given
/// to backward(), returned by a hook or overflowed in a sum are told apart. Forward is not checked.
///
/// The guard has to be there in backward; ops recorded before it was are found too, but without their call site. It
/// costs a walk up the stack for each op, and for each gradient two reductions and a wait for the device: it is for the
/// search, not for training. Functions have their names and lines only as far as the program has them: build with
/// -g, and link with -rdynamic where mica was built without libbacktrace.
class DetectAnomaly {
 public:
  explicit DetectAnomaly(bool on = true) : previous_(thread_state.detect_anomaly) { thread_state.detect_anomaly = on; }
  ~DetectAnomaly() { thread_state.detect_anomaly = previous_; }
  DetectAnomaly(const DetectAnomaly&) = delete;
  DetectAnomaly& operator=(const DetectAnomaly&) = delete;

 private:
  bool previous_;
};

/// True while a DetectAnomaly lives on this thread.
inline bool anomaly_enabled() { return thread_state.detect_anomaly; }

}  // namespace mica::autograd

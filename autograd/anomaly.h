#pragma once

#include <mica/autograd/detail/thread_state.h>
#include <mica/core/detail/nesting.h>

namespace mica::autograd {

/// Finds the origin of NaN and infinite gradients on this thread until the end of scope: `autograd::DetectAnomaly
/// guard;`.
///
/// Each recorded op remembers its call site, and backward() and grad() check every gradient. The first one that is not
/// finite raises an Error. The message names the op whose backward produced it from finite gradients, the input that it
/// belongs to (with the parameter's name, if a module registered it), the module and the call stack, and says whether a
/// tensor that the op saved in forward was already not finite. It also says so if the gradient was passed to
/// backward(), returned by a hook, or overflowed in a sum. Forward is not checked.
///
/// The guard must be active during backward. Ops recorded before it was created are reported too, without their call
/// site. The cost is a stack walk per op and, per gradient, two reductions and a device synchronization: use it for
/// debugging, not for training. Function names and lines need debug information: build with -g, and link with -rdynamic
/// if mica was built without libbacktrace.
class DetectAnomaly {
 public:
  explicit DetectAnomaly(bool on = true) : previous_(thread_state.detect_anomaly) { thread_state.detect_anomaly = on; }
  ~DetectAnomaly() { thread_state.detect_anomaly = previous_; }
  DetectAnomaly(const DetectAnomaly&) = delete;
  DetectAnomaly& operator=(const DetectAnomaly&) = delete;

 private:
  mica::detail::Nested<DetectAnomaly> nested_{"autograd::DetectAnomaly"};
  bool previous_;
};

/// True while a DetectAnomaly guard is active on this thread.
inline bool anomaly_enabled() { return thread_state.detect_anomaly; }

}  // namespace mica::autograd

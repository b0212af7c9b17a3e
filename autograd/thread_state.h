#pragma once

#include <memory>

namespace mica::autograd {

struct ModuleName;
class SegmentWatch;
class OpObserver;

/// What the guards of this thread have set. Every op asks several of these, so they lie together and cost no call.
struct ThreadState {
  bool grad_enabled = true;                             // GradMode
  bool inside_op = false;                               // InsideOp
  bool detect_anomaly = false;                          // DetectAnomaly
  SegmentWatch* segment = nullptr;                      // SegmentWatch
  const std::shared_ptr<ModuleName>* module = nullptr;  // CurrentModule
  OpObserver* op_observer = nullptr;                    // Profiler
};

extern thread_local constinit ThreadState thread_state;

}  // namespace mica::autograd

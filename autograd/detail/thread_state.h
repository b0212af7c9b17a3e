#pragma once

#include <memory>

namespace mica::autograd {

struct ModuleName;
class SegmentWatch;
class OpObserver;

/// State set by this thread's guards. Every op reads several of these, so they are kept together and read without a
/// call.
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

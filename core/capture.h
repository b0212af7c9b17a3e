#pragma once

// What code has to know of CUDA graphs that may run while one is captured (core/cuda/graph.h captures them). Needs no
// CUDA header; without CUDA nothing is ever captured.

#include <functional>
#include <memory>
#include <vector>

#include <mica/core/device.h>

namespace mica {

/// Whether this thread captures a CUDA graph (cuda::capture): its kernels are then recorded and do not run.
bool is_capturing();

/// For work of the host that a replay must not skip: counting steps, passing a new learning rate or random offset to
/// the device. Calls f now. While this thread captures a CUDA graph, f is kept with the graph instead and called before
/// each replay, in the order of registration, with the graph's stream as the current one: kernels that it launches run
/// before the graph's. f must keep alive what it uses; the graph owns f.
void on_each_replay(std::function<void()> f);

/// Throws if this thread captures a CUDA graph: for what a graph cannot do, as nothing has run when the host would read
/// it. The message begins with `op`.
void check_not_capturing(const char* op);

namespace detail {

struct CapturedRandom;  // core/rng.cpp

/// What a graph keeps of the calls that were captured into it, beside their kernels.
struct Capture {
  Device device;
  std::vector<std::function<void()>> calls;  // before each replay
  std::shared_ptr<CapturedRandom> random;    // null until a random tensor is drawn
};

/// The one under way on this thread, or null.
Capture* current_capture();

/// While it lives, this thread captures.
class Capturing {
 public:
  explicit Capturing(Capture& capture);
  ~Capturing();
  Capturing(const Capturing&) = delete;
  Capturing& operator=(const Capturing&) = delete;

 private:
  Capture* outer_;
};

}  // namespace detail

}  // namespace mica

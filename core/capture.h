#pragma once

// For code that may run while a CUDA graph is captured (core/cuda_graph.h captures them). Needs no CUDA header; without
// CUDA nothing is ever captured.

#include <functional>
#include <memory>
#include <vector>

#include <mica/core/device.h>

namespace mica {

/// Whether this thread captures a CUDA graph (cuda::capture): its kernels are then recorded and do not run.
bool is_capturing();

/// For host work that every replay must repeat: counting steps, passing a new learning rate or random offset to the
/// device. Calls f now. While this thread captures a CUDA graph, f is kept with the graph instead and called before
/// each replay, in the order of registration, with the graph's stream as the current one: kernels that it launches run
/// before the graph's. f must keep alive what it uses; the graph owns f. Throws if f is empty.
void on_each_replay(std::function<void()> f);

/// Throws if this thread captures a CUDA graph. For operations that read results on the host: captured kernels have not
/// run. The message begins with `op`.
void check_not_capturing(const char* op);

namespace detail {

struct CapturedRandom;  // core/rng.cpp

/// What a graph stores in addition to the captured kernels.
struct Capture {
  Device device;
  std::vector<std::function<void()>> calls;    // before each replay
  std::shared_ptr<CapturedRandom> random;      // null until a random tensor is drawn
  std::vector<std::function<void()>> after{};  // after the launch of each replay
};

/// This thread's capture, or null.
Capture* current_capture();

/// While this thread captures a CUDA graph: calls f after the launch of each replay, with the graph's stream as the
/// current one. The graph owns f.
void after_each_replay(std::function<void()> f);

/// Marks this thread as capturing until the end of scope.
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

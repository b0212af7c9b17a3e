#pragma once

// CUDA graphs. Needs no CUDA header.

#include <cstddef>
#include <functional>
#include <memory>

#include <mica/core/capture.h>
#include <mica/core/device.h>

namespace mica::cuda {

/// Kernels that were recorded once and can be launched again together, at a fraction of the host's cost:
///
///     step();                                                // creates states, gradients and library handles
///     cuda::Graph graph = cuda::capture([&] { step(); });    // runs nothing on the device
///     for (...) { fill(batch); graph.replay(); }
///
/// A replay computes what the captured calls would compute, bit for bit, from the current contents of the same
/// addresses. Inputs are tensors created before the capture, overwritten by copy_into or by functions of
/// on_each_replay(). Results are tensors created by the captured calls; each replay overwrites them. Each replay draws
/// new random tensors, with the same numbers as without a graph.
///
/// Host code (counters, branches on values, schedules) runs only once, during the capture. Pass what must run again to
/// on_each_replay(). A replay's writes are not counted as in-place writes.
///
/// Tensors created during the capture use memory that belongs to this graph; it is freed when the graph and these
/// tensors are gone. Tensors created before must outlive the graph. An empty graph (default-constructed) cannot be
/// replayed. Copying a Graph copies the handle.
class Graph {
 public:
  Graph() = default;

  bool empty() const { return state_ == nullptr; }
  /// Launches everything on the current stream of the graph's device. Does not wait.
  void replay() const;

  /// Kernels, copies and fills in the graph.
  std::size_t node_count() const;
  /// Bytes of device memory that only this graph uses.
  std::size_t reserved_bytes() const;

 private:
  friend Graph capture(const std::function<void()>& f, Device device);
  struct State;
  std::shared_ptr<State> state_;
};

/// Calls f once and records what it launches on `device`, without running it. Waits for the device first.
///
/// What cannot be captured throws an Error that names it: reading elements on the host (item, to_vector, printing),
/// copies from host memory or from another device, random tensors on the CPU. If f throws, nothing is captured, and the
/// device remains usable. Captures do not nest.
Graph capture(const std::function<void()>& f, Device device = Device::cuda());

}  // namespace mica::cuda

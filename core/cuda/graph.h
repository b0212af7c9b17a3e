#pragma once

// CUDA graphs. Needs no CUDA header.

#include <cstddef>
#include <functional>
#include <memory>

#include <mica/core/capture.h>
#include <mica/core/device.h>

namespace mica::cuda {

/// Kernels that were recorded once and can be launched again all at once, at a small part of the host's cost:
///
///     for (int i = 0; i < 3; ++i) step();                    // makes states, gradients and what libraries need
///     cuda::Graph graph = cuda::capture([&] { step(); });    // runs nothing on the device
///     for (...) { fill(batch); graph.replay(); }
///
/// A replay computes what the captured calls would have, bit for bit, from what stands at the same addresses. So inputs
/// are tensors that were made before and are written anew, by copy_into or by what on_each_replay() calls, and results
/// are tensors that the captured calls made: each replay writes them again. Random tensors are new ones in each replay,
/// the same as without a graph.
///
/// All that the host does happens once, when it is captured: counting, choosing by values, reading a schedule. What
/// must happen again goes to on_each_replay(). Writes by a replay are not counted as writes in place.
///
/// Tensors that are made during the capture get memory that only this graph uses; it is given back when the graph and
/// these tensors are gone. Tensors made before must live as long as the graph does. An empty graph
/// (default-constructed) cannot be replayed.
class Graph {
 public:
  Graph() = default;

  bool empty() const { return state_ == nullptr; }
  /// Launches everything on the current stream of the graph's device. Does not wait.
  void replay() const;

  /// Kernels, copies and fills in the graph.
  std::size_t node_count() const;
  /// Of device memory that only this graph uses.
  std::size_t reserved_bytes() const;

 private:
  friend Graph capture(const std::function<void()>& f, Device device);
  struct State;
  std::shared_ptr<State> state_;
};

/// Calls f once and records what it launches on `device`, without running it. Waits for the device first.
///
/// What cannot be captured throws an Error that names it: reading elements on the host (item, to_vector, printing),
/// copies from memory of the host or from another device, random tensors on the CPU. If f throws, nothing was captured,
/// and the device is ready for other work. Captures do not nest.
Graph capture(const std::function<void()>& f, Device device = Device::cuda());

}  // namespace mica::cuda

#pragma once

// What code has to know of CUDA graphs that may run while one is captured. Needs no CUDA header; without CUDA nothing
// is ever captured.

#include <functional>
#include <vector>

namespace mica {

/// Whether this thread captures a CUDA graph (cuda::capture): its kernels are then recorded and do not run.
bool is_capturing();

/// For work of the host that a replay must not skip: counting steps, passing a new learning rate or random offset to
/// the device. Calls f now. While this thread captures a CUDA graph, f is kept with the graph instead and called before
/// each replay, in the order of registration, with the graph's stream as the current one: kernels that it launches run
/// before the graph's. f must keep alive what it uses; the graph owns f.
void on_each_replay(std::function<void()> f);

/// Throws if this thread captures a CUDA graph: for what the host has to wait for. The message begins with `op`.
void check_not_capturing(const char* op);

namespace detail {

using ReplayCalls = std::vector<std::function<void()>>;

/// While it lives, this thread captures, and on_each_replay() appends to `calls`.
class Capturing {
 public:
  explicit Capturing(ReplayCalls& calls);
  ~Capturing();
  Capturing(const Capturing&) = delete;
  Capturing& operator=(const Capturing&) = delete;

 private:
  ReplayCalls* outer_;
};

}  // namespace detail

}  // namespace mica

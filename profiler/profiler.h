#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <mica/autograd/detail/thread_state.h>
#include <mica/core/detail/nesting.h>

namespace mica {

struct ProfilerOptions {
  bool device = true;  ///< measure what the current GPU does, if there is one
  bool nvtx = false;   ///< also mark each op for NVIDIA's tools, as "h.0.mlp.c_fc MatMul"
};

/// The cost of one op in one module, forward or backward, over all profiled steps. It includes the ops that it
/// calls.
struct ProfiledOp {
  std::string op;      // "MatMul"; the name of a ProfileRange; empty for work outside all ops
  std::string phase;   // "forward", "backward" or ""
  std::string module;  // the path of the calling module: "h.0.mlp"; empty outside all modules
  std::int64_t calls = 0;
  std::int64_t launches = 0;    // of mica's kernels; a library call counts as one
  double host_ms = 0;           // of this thread
  double device_ms = 0;         // of kernels, copies and fills
  std::int64_t bytes_kept = 0;  // tensor memory allocated minus freed, on the GPU (on the CPU if no GPU is measured)
};

/// The cost of one kernel over all profiled steps. Requires CUPTI.
struct ProfiledKernel {
  std::string name;
  std::int64_t calls = 0;
  double device_ms = 0;
};

/// Measures the host and GPU time of this thread's ops, from construction to stop():
///
///     Profiler profiler;
///     for (int i = 0; i < 10; ++i) { train_step(); profiler.step(); }
///     profiler.stop();
///     fmt::print("{}", profiler.table());
///     profiler.write_trace("trace.json");  // for ui.perfetto.dev or chrome://tracing
///
/// Device times come from CUPTI, which comes with the CUDA toolkit; without it, from events around the outermost ops,
/// without individual kernels. Work replayed by a cuda::Graph is not attributed to ops. A profiler adds about a
/// microsecond of host time per op. If another one is started meanwhile, it must be stopped first, and only it is
/// notified of ops.
class Profiler {
 public:
  explicit Profiler(ProfilerOptions options = {});
  /// Ends the measurement if it goes on. The program ends with an error if stop() would throw.
  ~Profiler();
  Profiler(const Profiler&) = delete;
  Profiler& operator=(const Profiler&) = delete;

  /// Ends a step: tables show the mean per step. Does not wait.
  void step();
  std::int64_t steps() const;
  /// Waits for the device and ends the measurement. Throws, changing nothing, on another thread than the one that
  /// constructed the profiler, while a later profiler runs, and inside an op or a ProfileRange. The following functions
  /// throw before it.
  void stop();

  /// Sorted by device time, or by host time if no GPU was used.
  const std::vector<ProfiledOp>& ops() const;
  const std::vector<ProfiledKernel>& kernels() const;
  /// From the start to stop(), excluding the wait for earlier work.
  double wall_ms() const;
  /// The time during which the GPU was busy.
  double device_busy_ms() const;
  /// "CUPTI", "CUDA events" or "" if no GPU was measured.
  const std::string& device_source() const;

  /// A text table of the most expensive ops, modules (indices as *, so that all blocks are one row) and kernels, at
  /// most `rows` of each; means per step.
  std::string table(int rows = 30) const;
  /// Every op, kernel, copy and fill with its times, in the format of Chrome's trace viewer. Throws if the file cannot
  /// be written.
  void write_trace(const std::filesystem::path& path) const;

 private:
  struct State;
  const State& stopped(const char* function) const;
  std::unique_ptr<State> state_;
};

/// A named range for the profiler, until the end of scope, for work outside ops: `ProfileRange range("optimizer");`.
/// Costs one branch if no profiler is active. Ranges must end in the reverse order, on the thread that began them;
/// otherwise the program ends with an error.
class ProfileRange {
 public:
  /// Throws if `name` is null.
  explicit ProfileRange(const char* name);
  ~ProfileRange();
  ProfileRange(const ProfileRange&) = delete;
  ProfileRange& operator=(const ProfileRange&) = delete;

 private:
  detail::Nested<ProfileRange> nested_{"ProfileRange"};
  autograd::OpObserver* observer_;  // null: no profiler was active
};

}  // namespace mica

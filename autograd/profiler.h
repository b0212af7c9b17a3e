#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace mica {

struct ProfilerOptions {
  bool device = true;  ///< measure what the current GPU does, if there is one
  bool nvtx = false;   ///< also mark each op for NVIDIA's tools, as "h.0.mlp.c_fc MatMul"
};

/// What one op cost in one place, forward or backward, over all profiled steps. An op that calls others owns what these
/// do.
struct ProfiledOp {
  std::string op;      // "MatMul"; what a ProfileRange is called; empty for work outside of all ops
  std::string phase;   // "forward", "backward" or ""
  std::string module;  // the path of the module it was called in: "h.0.mlp"; empty outside of all
  std::int64_t calls = 0;
  std::int64_t launches = 0;    // of kernels by mica's own code; libraries' kernels count as one for each call
  double host_ms = 0;           // of this thread
  double device_ms = 0;         // of kernels, copies and fills
  std::int64_t bytes_kept = 0;  // of tensors on the GPU (the CPU where there is none) that were made minus those freed
};

/// What one kernel cost over all profiled steps. Known if CUPTI is there.
struct ProfiledKernel {
  std::string name;
  std::int64_t calls = 0;
  double device_ms = 0;
};

/// Measures, from construction to stop(), what the ops that this thread runs cost on the host and on the GPU:
///
///     Profiler profiler;
///     for (int i = 0; i < 10; ++i) { train_step(); profiler.step(); }
///     profiler.stop();
///     fmt::print("{}", profiler.table());
///     profiler.write_trace("trace.json");  // for ui.perfetto.dev or chrome://tracing
///
/// Device times come from CUPTI, which comes with the CUDA toolkit; where it is missing, from events around the
/// outermost ops, which then know of no single kernel. Work replayed by a cuda::Graph belongs to no op. One profiler at
/// a time; profiled ops take longer on the host, by about a microsecond each.
class Profiler {
 public:
  explicit Profiler(ProfilerOptions options = {});
  /// Stops.
  ~Profiler();
  Profiler(const Profiler&) = delete;
  Profiler& operator=(const Profiler&) = delete;

  /// Ends a step: tables then show the mean of the steps. Does not wait.
  void step();
  /// Waits for the device and ends the measurement. What follows is for after it.
  void stop();

  /// In order of device time, or of host time where no GPU was at work.
  const std::vector<ProfiledOp>& ops() const;
  const std::vector<ProfiledKernel>& kernels() const;
  std::int64_t steps() const;
  /// From the start to stop(), without waiting for work from before the start.
  double wall_ms() const;
  /// During which the GPU did something.
  double device_busy_ms() const;
  /// "CUPTI", "CUDA events" or "" if no GPU was measured.
  const std::string& device_source() const;

  /// The ops, the modules (indices as *, so that all blocks are one) and the kernels that cost most, at most `rows` of
  /// each, a step's mean, as text.
  std::string table(int rows = 30) const;
  /// Every op, kernel, copy and fill with its times, in the format of Chrome's trace viewer. Throws if the file cannot
  /// be written.
  void write_trace(const std::filesystem::path& path) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Names what runs until the end of scope for the profiler, if it is no op: `ProfileRange range("optimizer");`. Costs a
/// branch when nobody profiles. `name` must outlive it.
class ProfileRange {
 public:
  explicit ProfileRange(const char* name);
  ~ProfileRange();
  ProfileRange(const ProfileRange&) = delete;
  ProfileRange& operator=(const ProfileRange&) = delete;

 private:
  bool observed_;
};

}  // namespace mica

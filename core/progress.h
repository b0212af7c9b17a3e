#pragma once

// Progress of tasks that take seconds: loading a model, tokenizing a text, quantizing weights. They do not print; a
// program that wants to show progress creates a ProgressObserver, such as train::ProgressBar.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>

namespace mica {

struct ProgressReport {
  const std::string& task;  ///< "loading model.safetensors"
  std::int64_t done;        ///< out of `total`, in units of the task: bytes, tensors, …
  std::int64_t total;       ///< at least 1
  double seconds;           ///< since the task began
  bool finished;            ///< the task's last report, even if an exception ended it
  /// An estimate from the rate so far; none at the very beginning.
  std::optional<double> seconds_left() const;
};

/// Tasks that this thread begins report to `callback` until the end of scope: at most ten times a second and at the
/// end. Reports of one task come one at a time, but possibly from another thread, if the task uses several. An inner
/// observer replaces an outer one. The callback must not throw. The tasks must end before the observer; otherwise the
/// program ends with an error.
class ProgressObserver {
 public:
  using Callback = std::function<void(const ProgressReport&)>;

  explicit ProgressObserver(Callback callback);
  ~ProgressObserver();
  ProgressObserver(const ProgressObserver&) = delete;
  ProgressObserver& operator=(const ProgressObserver&) = delete;

 private:
  friend class ProgressTask;

  Callback callback_;
  ProgressObserver* outer_;
  std::atomic<int> tasks_{0};  // that report to it
};

/// Reports the progress of a long task. The cost without an observer is negligible:
///
///     ProgressTask progress("quantizing", static_cast<std::int64_t>(layers.size()));
///     for (Layer& layer : layers) {
///       quantize(layer);
///       progress.advance();
///     }
class ProgressTask {
 public:
  /// `name` is ProgressReport::task. With a total below 1 there is nothing to do, and reports say 1 of 1.
  ProgressTask(std::string name, std::int64_t total);
  /// Makes the last report.
  ~ProgressTask();
  ProgressTask(const ProgressTask&) = delete;
  ProgressTask& operator=(const ProgressTask&) = delete;

  /// Adds to ProgressReport::done. May be called on any thread.
  void advance(std::int64_t amount = 1);

 private:
  using Clock = std::chrono::steady_clock;

  void report(bool finished);

  std::string name_;
  std::int64_t total_;
  ProgressObserver* observer_;  // null without one
  std::atomic<std::int64_t> done_;
  Clock::time_point start_;
  std::mutex mutex_;  // guards the members below
  Clock::time_point reported_;
};

}  // namespace mica

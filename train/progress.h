#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace mica::train {

/// How fast a run is.
struct Speed {
  double units_per_second;                ///< tokens, samples, …
  std::optional<double> share_of_peak{};  ///< of the device's peak floating-point rate
  std::size_t peak_memory = 0;            ///< on the device, in bytes
};

/// Shows the progress of training on stdout, with the time left: a bar that is redrawn on a terminal, a line for every
/// twentieth of the steps otherwise.
///
///     train::Progress progress(steps);
///     …
///     if (progress.wants(step)) progress.show(step, loss.item(), {}, {.units_per_second = batch / seconds});
class Progress {
 public:
  /// `done`: the number of steps taken by an earlier run. `unit` is the plural of what is counted for the speed.
  explicit Progress(std::int64_t steps, std::int64_t done = 0, std::string unit = "samples");
  /// Ends the bar's line.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Whether `step` should be shown; other steps cost nothing.
  bool wants(std::int64_t step) const;
  void show(std::int64_t step, double train_loss, std::optional<double> validation_loss, const Speed& speed);
  /// Prints a line of text, if it is not empty; the bar goes on below it.
  void say(const std::string& text);

 private:
  using Clock = std::chrono::steady_clock;

  std::int64_t steps_;
  std::int64_t done_;
  std::string unit_;
  bool terminal_;
  Clock::time_point start_ = Clock::now();
  Clock::time_point shown_{};
  std::optional<double> validation_loss_;
};

}  // namespace mica::train

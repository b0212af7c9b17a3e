#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>

struct Speed {
  double tokens_per_second;
  std::optional<double> share_of_peak;  // of the device's peak floating-point rate
  std::size_t peak_memory;              // on the device, in bytes
};

/// Shows the training progress on stdout: a bar that is redrawn on a terminal, occasional plain lines otherwise.
class Progress {
 public:
  /// `done`: the number of steps taken by an earlier run.
  explicit Progress(std::int64_t steps, std::int64_t done = 0);
  /// Ends the bar's line.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Whether `step` should be shown; other steps cost nothing.
  bool wants(std::int64_t step) const;
  void show(std::int64_t step, double train_loss, std::optional<double> validation_loss, const Speed& speed);

 private:
  using Clock = std::chrono::steady_clock;

  std::int64_t steps_;
  std::int64_t done_;
  bool terminal_;
  Clock::time_point start_ = Clock::now();
  Clock::time_point shown_{};
  std::optional<double> validation_loss_;
};

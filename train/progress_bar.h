#pragma once

#include <chrono>

#include <mica/core/progress.h>

namespace mica::train {

/// During its lifetime, shows the progress of the library's tasks (reading, tokenizing, loading, validating) that take
/// more than two seconds on stderr: on a terminal as a bar, which is removed at the end, otherwise as a line every ten
/// seconds. For tasks of the thread that creates it.
class ProgressBar {
 public:
  /// `shows` = false: shows nothing, for ranks other than 0.
  explicit ProgressBar(bool shows = true);

 private:
  using Clock = std::chrono::steady_clock;

  void show(const ProgressReport& report);

  bool shows_;
  bool terminal_;
  bool drawn_ = false;             // whether there is a bar on the terminal
  Clock::time_point next_line_{};  // without a terminal
  ProgressObserver observer_;
};

}  // namespace mica::train

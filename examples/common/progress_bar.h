#pragma once

#include <chrono>
#include <string>

#include <mica/core/progress.h>

/// "1:02:03" or "2:03".
std::string duration(double seconds);

/// A line that replaces the terminal's current one: a bar filled to `part`, in [0, 1], and a text. If there is no room
/// for the bar, the text alone, cut off at the terminal's width.
std::string redrawn_line(double part, std::string text);

/// During its lifetime, shows the progress of library tasks that take more than two seconds on stderr: on a terminal as
/// a bar, which is removed at the end, otherwise as a line every ten seconds.
class ProgressBar {
 public:
  ProgressBar();

 private:
  using Clock = std::chrono::steady_clock;

  void show(const mica::ProgressReport& report);

  bool terminal_;
  bool drawn_ = false;             // whether there is a bar on the terminal
  Clock::time_point next_line_{};  // without a terminal
  mica::ProgressObserver observer_;
};

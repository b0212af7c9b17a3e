#pragma once

#include <chrono>
#include <string>

#include <mica/core/progress.h>

/// "1:02:03" or "2:03".
std::string duration(double seconds);

/// A line that replaces the terminal's present one: a bar of which `part`, in [0, 1], is filled, and a text; the text
/// alone, cut, if there is no room.
std::string redrawn_line(double part, std::string text);

/// While it lives, shows on stderr what the library takes more than two seconds for: a bar on a terminal, which is
/// removed at the end, and otherwise a line every ten seconds.
class ProgressBar {
 public:
  ProgressBar();

 private:
  using Clock = std::chrono::steady_clock;

  void show(const mica::ProgressReport& report);

  bool terminal_;
  bool drawn_ = false;             // there is a bar on the terminal
  Clock::time_point next_line_{};  // where there is no terminal
  mica::ProgressObserver observer_;
};

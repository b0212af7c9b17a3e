#include "examples/common/progress_bar.h"

#include <fmt/core.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string_view>

#include "examples/common/program.h"

namespace {

constexpr double kShortest = 2;  // seconds
constexpr std::chrono::seconds kBetweenLines{10};

int terminal_width() {
  for (const int descriptor : {STDOUT_FILENO, STDERR_FILENO}) {
    winsize size{};
    if (ioctl(descriptor, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) {
      return size.ws_col;
    }
  }
  return 80;
}

// A bar `width` cells wide, in eighths of a cell.
std::string bar(double part, int width) {
  static const char* const eighths[] = {" ", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
  const int filled = static_cast<int>(part * width * 8);
  std::string cells;
  for (int i = 0; i < width; ++i) {
    const int rest = std::clamp(filled - i * 8, 0, 8);
    cells += rest == 8 ? "█" : eighths[rest];
  }
  return cells;
}

void put_error(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

}  // namespace

std::string duration(double seconds) {
  const auto s = static_cast<std::int64_t>(seconds + 0.5);
  if (s >= 3600) {
    return fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
  }
  return fmt::format("{}:{:02}", s / 60, s % 60);
}

std::string redrawn_line(double part, std::string text) {
  const int room = terminal_width() - 1;
  const int cells = std::min(30, room - static_cast<int>(text.size()) - 3);
  if (cells >= 5) {
    text = fmt::format("[{}] {}", bar(part, cells), text);
  } else {
    text.resize(std::min(text.size(), static_cast<std::size_t>(std::max(room, 0))));
  }
  return fmt::format("\r{}\x1b[K", text);
}

ProgressBar::ProgressBar()
    : terminal_(shows_on_terminal(STDERR_FILENO)),
      observer_([this](const mica::ProgressReport& report) { show(report); }) {}

void ProgressBar::show(const mica::ProgressReport& report) {
  if (rank_of_messages > 0) {
    return;
  }
  if (report.finished) {
    if (drawn_) {
      put_error("\r\x1b[K");
    }
    drawn_ = false;
    next_line_ = {};
    return;
  }
  const double left = report.seconds_left().value_or(kShortest);
  if (!drawn_ && report.seconds + left < kShortest) {
    return;
  }
  const double part = static_cast<double>(report.done) / static_cast<double>(report.total);
  const std::string text = fmt::format("{}: {:.0f} %, {} left", report.task, 100 * part, duration(left));
  if (terminal_) {
    put_error(redrawn_line(part, text));
    drawn_ = true;
  } else if (report.seconds >= kShortest && Clock::now() >= next_line_) {
    put_error(text + "\n");
    next_line_ = Clock::now() + kBetweenLines;
  }
}

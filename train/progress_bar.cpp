#include <fmt/core.h>
#include <unistd.h>

#include <cstdio>
#include <string>
#include <string_view>

#include <mica/train/detail/terminal.h>
#include <mica/train/progress_bar.h>

namespace mica::train {

namespace {

constexpr double shortest_shown = 2;  // seconds
constexpr std::chrono::seconds between_lines{10};

void put_error(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

}  // namespace

ProgressBar::ProgressBar(bool shows)
    : shows_(shows),
      terminal_(detail::shows_on_terminal(STDERR_FILENO)),
      observer_([this](const ProgressReport& report) { show(report); }) {}

void ProgressBar::show(const ProgressReport& report) {
  if (!shows_) {
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
  const double left = report.seconds_left().value_or(shortest_shown);
  if (!drawn_ && report.seconds + left < shortest_shown) {
    return;
  }
  const double part = static_cast<double>(report.done) / static_cast<double>(report.total);
  const std::string text = fmt::format("{}: {:.0f} %, {} left", report.task, 100 * part, detail::duration(left));
  if (terminal_) {
    put_error(detail::redrawn_line(part, text));
    drawn_ = true;
  } else if (report.seconds >= shortest_shown && Clock::now() >= next_line_) {
    put_error(text + "\n");
    next_line_ = Clock::now() + between_lines;
  }
}

}  // namespace mica::train

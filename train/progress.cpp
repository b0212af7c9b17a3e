#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include <mica/train/detail/terminal.h>
#include <mica/train/progress.h>

namespace mica::train {

namespace {

std::string rate(double per_second, const std::string& unit) {
  return per_second < 1e6 ? fmt::format("{:.1f}k {}/s", per_second / 1e3, unit)
                          : fmt::format("{:.2f}M {}/s", per_second / 1e6, unit);
}

std::string memory(std::size_t bytes) {
  const double mebibytes = static_cast<double>(bytes) / 0x1p20;
  return mebibytes < 1024 ? fmt::format("{:.0f} MiB", mebibytes) : fmt::format("{:.1f} GiB", mebibytes / 1024);
}

}  // namespace

Progress::Progress(std::int64_t steps, std::int64_t done, std::string unit)
    : steps_(steps), done_(done), unit_(std::move(unit)), terminal_(detail::shows_on_terminal(STDOUT_FILENO)) {}

Progress::~Progress() {
  if (terminal_ && shown_ != Clock::time_point{}) {
    std::fputc('\n', stdout);
  }
  std::fflush(stdout);
}

bool Progress::wants(std::int64_t step) const {
  if (step == steps_) {
    return true;
  }
  if (terminal_) {
    return Clock::now() - shown_ >= std::chrono::milliseconds(100);
  }
  return step == done_ + 1 || step % std::max<std::int64_t>(1, steps_ / 20) == 0;
}

void Progress::show(std::int64_t step, double train_loss, std::optional<double> validation_loss, const Speed& speed) {
  if (validation_loss) {
    validation_loss_ = validation_loss;
  }
  shown_ = Clock::now();
  const double elapsed = std::chrono::duration<double>(shown_ - start_).count();
  const std::string left =
      detail::duration(elapsed / static_cast<double>(step - done_) * static_cast<double>(steps_ - step));
  std::string text = fmt::format("step {}/{}  loss {:.3f}", step, steps_, train_loss);
  // Plain lines show the validation loss only at the step where it was measured.
  const std::optional<double> shown_loss = terminal_ ? validation_loss_ : validation_loss;
  if (shown_loss) {
    text += fmt::format("  val {:.3f}", *shown_loss);
  }
  text += fmt::format("  {}", rate(speed.units_per_second, unit_));
  if (speed.share_of_peak) {
    text += fmt::format(" ({:.0f} % of peak)", 100 * *speed.share_of_peak);
  }
  text += fmt::format("  {}  {} left", memory(speed.peak_memory), left);
  if (terminal_) {
    text = detail::redrawn_line(static_cast<double>(step) / static_cast<double>(steps_), text);
  } else {
    text += '\n';
  }
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

void Progress::say(const std::string& text) {
  if (!text.empty()) {
    const std::string line = (terminal_ && shown_ != Clock::time_point{} ? "\n" : "") + text + "\n";
    std::fwrite(line.data(), 1, line.size(), stdout);
    std::fflush(stdout);
    shown_ = {};  // nothing is shown on the current line
  }
}

}  // namespace mica::train

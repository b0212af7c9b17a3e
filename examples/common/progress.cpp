#include "examples/common/progress.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <string>

#include "examples/common/program.h"
#include "examples/common/progress_bar.h"

namespace {

std::string rate(double tokens_per_second) {
  return tokens_per_second < 1e6 ? fmt::format("{:.1f}k tokens/s", tokens_per_second / 1e3)
                                 : fmt::format("{:.2f}M tokens/s", tokens_per_second / 1e6);
}

std::string memory(std::size_t bytes) {
  const double mebibytes = static_cast<double>(bytes) / 0x1p20;
  return mebibytes < 1024 ? fmt::format("{:.0f} MiB", mebibytes) : fmt::format("{:.1f} GiB", mebibytes / 1024);
}

}  // namespace

Progress::Progress(std::int64_t steps, std::int64_t done)
    : steps_(steps), done_(done), terminal_(shows_on_terminal(STDOUT_FILENO)) {}

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
  const std::string left = duration(elapsed / static_cast<double>(step - done_) * static_cast<double>(steps_ - step));
  std::string text = fmt::format("step {}/{}  loss {:.3f}", step, steps_, train_loss);
  // Plain lines show the validation loss only at the step where it was measured.
  const std::optional<double> shown_loss = terminal_ ? validation_loss_ : validation_loss;
  if (shown_loss) {
    text += fmt::format("  val {:.3f}", *shown_loss);
  }
  text += fmt::format("  {}", rate(speed.tokens_per_second));
  if (speed.share_of_peak) {
    text += fmt::format(" ({:.0f} % of peak)", 100 * *speed.share_of_peak);
  }
  text += fmt::format("  {}  {} left", memory(speed.peak_memory), left);
  if (terminal_) {
    put(redrawn_line(static_cast<double>(step) / static_cast<double>(steps_), text));
  } else {
    fmt::print("{}\n", text);
  }
  std::fflush(stdout);
}

#include <fmt/core.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include <mica/train/detail/terminal.h>

namespace mica::train::detail {

namespace {

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

}  // namespace

bool shows_on_terminal(int file) {
  // Open MPI's mpirun gives its ranks a pseudo-terminal, even if its own output is not a terminal.
  return isatty(file) == 1 && std::getenv("OMPI_COMM_WORLD_SIZE") == nullptr;
}

std::string duration(double seconds) {
  const std::int64_t s = std::llround(seconds);
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

void warn(std::string_view program, std::string message) {
  std::replace(message.begin(), message.end(), '\n', ' ');
  std::fflush(stdout);
  // One write, since several ranks may write at the same time.
  const std::string line = fmt::format("{}: {}\n", program, message);
  std::fwrite(line.data(), 1, line.size(), stderr);
}

}  // namespace mica::train::detail

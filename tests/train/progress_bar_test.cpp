#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <regex>
#include <string>
#include <thread>

#include <mica/core/progress.h>
#include <mica/train/progress_bar.h>

using namespace mica;

namespace {

// 0:02 left, or more on a busy machine.
const std::string kShown = "sorting: 50 %, 0:[0-9]{2} left";

/// Sends stderr to a descriptor during its lifetime.
class Redirected {
 public:
  explicit Redirected(int to) : before_(dup(STDERR_FILENO)) { dup2(to, STDERR_FILENO); }
  ~Redirected() {
    dup2(before_, STDERR_FILENO);
    close(before_);
  }
  Redirected(const Redirected&) = delete;
  Redirected& operator=(const Redirected&) = delete;

 private:
  int before_;
};

// Half of a task that takes longer than the two seconds from which a bar is shown, and one that takes less.
void run_tasks() {
  const train::ProgressBar bar;
  {
    ProgressTask quick("quick", 2);
    std::this_thread::sleep_for(std::chrono::milliseconds(110));
    quick.advance(2);
  }
  ProgressTask task("sorting", 100);
  std::this_thread::sleep_for(std::chrono::milliseconds(2100));
  task.advance(50);
}

std::string read_all(int descriptor) {
  std::string text;
  std::array<char, 4096> buffer{};
  for (ssize_t count; (count = read(descriptor, buffer.data(), buffer.size())) > 0;) {
    text.append(buffer.data(), static_cast<std::size_t>(count));
  }
  return text;
}

TEST(ProgressBar, IsALineWithTheTimeLeftWithoutATerminal) {
  int pipe_ends[2];
  ASSERT_EQ(pipe(pipe_ends), 0);
  {
    const Redirected stderr_to(pipe_ends[1]);
    run_tasks();
  }
  close(pipe_ends[1]);
  const std::string shown = read_all(pipe_ends[0]);
  EXPECT_TRUE(std::regex_match(shown, std::regex(kShown + "\n"))) << shown;
  close(pipe_ends[0]);
}

TEST(ProgressBar, IsDrawnOnATerminalAndRemovedAtTheEnd) {
  if (getenv("OMPI_COMM_WORLD_SIZE") != nullptr) {
    GTEST_SKIP() << "under mpirun, no output counts as a terminal";
  }
  const int terminal = posix_openpt(O_RDWR | O_NOCTTY);
  ASSERT_GE(terminal, 0);
  ASSERT_EQ(grantpt(terminal), 0);
  ASSERT_EQ(unlockpt(terminal), 0);
  std::array<char, 100> name{};
  ASSERT_EQ(ptsname_r(terminal, name.data(), name.size()), 0);
  const int screen = open(name.data(), O_RDWR | O_NOCTTY);
  ASSERT_GE(screen, 0);
  {
    const Redirected stderr_to(screen);
    run_tasks();
  }
  close(screen);  // so that reading ends with an error after all that was written
  const std::string shown = read_all(terminal);
  EXPECT_NE(shown.find("█"), std::string::npos) << shown;
  EXPECT_TRUE(std::regex_search(shown, std::regex(kShown))) << shown;
  EXPECT_EQ(shown.find("quick"), std::string::npos) << shown;
  EXPECT_TRUE(shown.ends_with("\r\x1b[K")) << shown;
  close(terminal);
}

}  // namespace

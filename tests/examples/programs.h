#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <tests/files.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>

namespace mica::testing_support {

/// How a program ended: its exit status, or −1 if a signal ended it, and what it wrote.
struct Outcome {
  int status;
  std::string out;
  std::string err;
};

/// Runs a line of a shell in `folder`, where its output stays in out.txt and err.txt.
inline Outcome run_line(const std::filesystem::path& folder, const std::string& line) {
  const int status = std::system(("cd '" + folder.string() + "' && " + line + " >out.txt 2>err.txt").c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, contents(folder / "out.txt"), contents(folder / "err.txt")};
}

/// Runs a program in the folder `programs`, by a shell, for at most a minute. `command` is the program's name and its
/// options; the working directory is `folder`.
inline Outcome run_program(const std::filesystem::path& folder, const std::filesystem::path& programs,
                           const std::string& command) {
  return run_line(folder, "timeout 60 '" + programs.string() + "'/" + command);
}

/// Expects the exit status, and one line on stderr that contains `text`.
inline void expect_refused(const Outcome& outcome, const std::string& command, int status, const std::string& text) {
  EXPECT_EQ(outcome.status, status) << command << "\n" << outcome.err;
  EXPECT_NE(outcome.err.find(text), std::string::npos) << command << "\n" << outcome.err;
  EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
}

}  // namespace mica::testing_support

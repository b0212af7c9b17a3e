#pragma once

#include <string>
#include <string_view>

namespace mica::train::detail {

/// Whether this file (STDOUT_FILENO …) is a terminal, on which lines can be redrawn.
bool shows_on_terminal(int file);

/// "1:02:03" or "2:03".
std::string duration(double seconds);

/// A line that replaces the terminal's current one: a bar filled to `part`, in [0, 1], and a text. If there is no room
/// for the bar, the text alone, cut off at the terminal's width.
std::string redrawn_line(double part, std::string text);

/// Writes "PROGRAM: MESSAGE" as one line to stderr.
void warn(std::string_view program, std::string message);

}  // namespace mica::train::detail

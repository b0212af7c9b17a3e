#pragma once

#include <csignal>
#include <exception>
#include <stdexcept>
#include <string>
#include <string_view>

#include <mica/core/device.h>

/// An error in the command line.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Ends a rank when rank 0 reports why.
class StoppedByRank0 : public std::exception {
 public:
  const char* what() const noexcept override { return "stopped by rank 0"; }
};

/// This process among those of its run; set by join_ranks().
extern int rank_of_messages;

/// Writes "program: message" as one line to stderr, or "program: rank R: message" on other ranks than 0, and returns
/// `status`.
int print_error(const char* program, std::string message, int status);

/// Writes text to stdout and flushes it.
void put(std::string_view text);

/// Whether a terminal shows what is written to this file (STDOUT_FILENO …), so that lines can be replaced.
bool shows_on_terminal(int file);

/// Whether a signal has asked the program to stop; see catch_interrupts().
extern volatile std::sig_atomic_t interrupted;

/// From now on SIGINT, SIGTERM and SIGUSR1, which mpirun and Slurm pass on, set `interrupted`. The same one again
/// terminates the program.
void catch_interrupts();

/// "auto" (a GPU if there is one, else the CPU), "cpu" or "cuda". The GPU is the first one, or of several ranks on this
/// machine each has its own. Throws if there is no such device.
mica::Device device_named(const std::string& name);

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

/// Ends a rank after an error that rank 0 reports.
class StoppedByRank0 : public std::exception {
 public:
  const char* what() const noexcept override { return "stopped by rank 0"; }
};

/// This process's rank, for messages; set by join_ranks().
extern int rank_of_messages;

/// Writes "program: message" as one line to stderr, or "program: rank R: message" on other ranks than 0, and returns
/// `status`.
int print_error(const char* program, std::string message, int status);

/// Writes text to stdout and flushes it.
void put(std::string_view text);

/// Whether this file (STDOUT_FILENO …) is a terminal, on which lines can be redrawn.
bool shows_on_terminal(int file);

/// Whether a signal has asked the program to stop; see catch_interrupts().
extern volatile std::sig_atomic_t interrupted;

/// Makes SIGINT, SIGTERM and SIGUSR1, which mpirun and Slurm pass on, set `interrupted`. A second signal of the same
/// kind terminates the program.
void catch_interrupts();

/// If a mapped file cannot be read, since it was truncated or its disk failed, ends the program with status 1 and an
/// error that names the file.
void report_mapping_faults(const std::string& program);

/// "auto" (a GPU if there is one, else the CPU), "cpu" or "cuda". The GPU is the first one; if several ranks run on
/// this machine, each gets its own. Throws if there is no such device.
mica::Device device_named(const std::string& name);

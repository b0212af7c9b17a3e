#pragma once

#include <csignal>
#include <stdexcept>
#include <string>
#include <string_view>

#include <mica/core/device.h>

/// An error in the command line.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Writes "program: message" as one line to stderr and returns `status`.
int print_error(const char* program, std::string message, int status);

/// Writes text to stdout and flushes it.
void put(std::string_view text);

/// Whether a signal has asked the program to stop; see catch_interrupts().
extern volatile std::sig_atomic_t interrupted;

/// From now on SIGINT and SIGTERM set `interrupted`. A second one terminates the program.
void catch_interrupts();

/// "auto" (the first GPU if there is one, else the CPU), "cpu" or "cuda". Throws if there is no such device.
mica::Device device_named(const std::string& name);

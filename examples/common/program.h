#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

#include <mica/core/device.h>
#include <mica/core/dtype.h>

/// An error in the command line.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// This process's rank, for messages; set by join_ranks().
extern int rank_of_messages;

/// Writes "program: message" as one line to stderr, or "program: rank R: message" on other ranks than 0, and returns
/// `status`.
int print_error(const char* program, std::string message, int status);

/// Writes text to stdout and flushes it.
void put(std::string_view text);

/// If a mapped file cannot be read, since it was truncated or its disk failed, ends the program with status 1 and an
/// error that names the file.
void report_mapping_faults(const std::string& program);

/// "auto" (a GPU if there is one, else the CPU), "cpu" or "cuda". The GPU is the first one; if several ranks run on
/// this machine, each gets its own. Throws if there is no such device.
mica::Device device_named(const std::string& name);

/// "float32", "float16", "bfloat16", or "auto": bfloat16 if the device is fast with it, else float32.
mica::DType dtype_named(const std::string& name, mica::Device device);

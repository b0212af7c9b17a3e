#pragma once

#include <chrono>
#include <string>

// Helpers for programs that may run as several ranks (mpirun -n 4 program …) but behave like a single one: see also
// mica/train/ranks.h.

/// Connects to the other ranks; CommandLine::run() calls it first. Afterwards, output of ranks other than 0 to stdout
/// is discarded, and their error messages name the rank.
void join_ranks();

/// Throws UsageError if there are several ranks, which `program` does not support.
void refuse_ranks(const char* program);

/// Starts the same command as `count` ranks, one per GPU of this machine, waits for them, and exits with the status of
/// the first rank that fails. In a process that already is one of `count` ranks, it just returns. Throws if there are
/// fewer GPUs.
void start_ranks_on_gpus(int count, char** argv);

/// Starts `program` as `count` ranks on this machine, and returns the status of the first that fails, or 0. Once one
/// has failed, the others are killed if all of them are stopped, or if none ends for as long as `patience`. Passes
/// SIGTERM and SIGUSR1 on. For a process that does nothing else.
int run_ranks(int count, const std::string& program, char** argv,
              std::chrono::milliseconds patience = std::chrono::seconds(8));

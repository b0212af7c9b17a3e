#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include <mica/core/rng.h>
#include <mica/dist/group.h>

// Helpers for programs that may run as several ranks (mpirun -n 4 program …) but behave like a single one: rank 0
// writes all files and messages. In a program that was started as a single process, these functions communicate
// nothing.

/// Connects to the other ranks; CommandLine::run() calls it first. Afterwards, output of ranks other than 0 to stdout
/// is discarded, and their error messages name the rank.
void join_ranks();

/// Throws UsageError if there are several ranks, which `program` does not support.
void refuse_ranks(const char* program);

/// Calls f on rank 0 only. If it throws there, that exception ends all ranks: the others throw StoppedByRank0.
void on_rank_0(const mica::dist::Group& group, const std::function<void()>& f);

/// For each condition, whether it is true on any rank.
std::vector<bool> true_on_any(const mica::dist::Group& group, const std::vector<bool>& conditions);

/// The ranks on which the condition is true.
std::vector<int> ranks_where(const mica::dist::Group& group, bool condition);

/// Returns rank 0's text on every rank.
std::string broadcast(const mica::dist::Group& group, std::string text);

/// Divides the cores of each machine among its ranks, unless OMP_NUM_THREADS is set. All ranks must call it.
void share_cores(const mica::dist::Group& group);

/// Maps rank 0's random state to that of this rank's own stream, so that dropout differs among the ranks. Returns rank
/// 0's state on rank 0.
mica::PhiloxKey random_stream_of(int rank, mica::PhiloxKey key);

/// Starts the same command as `count` ranks, one per GPU of this machine, waits for them, and exits with the status of
/// the first rank that fails. In a process that already is one of `count` ranks, it just returns. Throws if there are
/// fewer GPUs.
void start_ranks_on_gpus(int count, char** argv);

#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include <mica/core/rng.h>
#include <mica/dist/group.h>

// Programs of several ranks (mpirun -n 4 program …), which look like one program from outside: rank 0 writes the files
// and the messages. Everything here does nothing, or no more than is asked for, in a program that was started alone.

/// Finds the ranks; CommandLine::run() calls it first. From then on, what other ranks than 0 write to stdout is
/// discarded, and their errors name them.
void join_ranks();

/// Throws UsageError in a program of several ranks, which `program` does not support.
void refuse_ranks(const char* program);

/// Calls f on rank 0 only. If it throws there, that exception ends all ranks: the others throw StoppedByRank0.
void on_rank_0(const mica::dist::Group& group, const std::function<void()>& f);

/// For each of the conditions, whether it is true on any rank.
std::vector<bool> true_on_any(const mica::dist::Group& group, const std::vector<bool>& conditions);

/// The ranks on which the condition is true.
std::vector<int> ranks_where(const mica::dist::Group& group, bool condition);

/// Rank 0's text, on each rank.
std::string broadcast(const mica::dist::Group& group, std::string text);

/// The ranks of one machine share its cores, unless OMP_NUM_THREADS says what each uses. All ranks must call it.
void share_cores(const mica::dist::Group& group);

/// The place in a random stream of the rank's own that belongs to this one of rank 0, which it is for rank 0. Dropout
/// then differs among the ranks.
mica::PhiloxKey random_stream_of(int rank, mica::PhiloxKey key);

/// Starts `count` ranks of the same command, one for each GPU of this machine, waits for them, and ends the program
/// with the status of the first that fails. Returns in a process that is one of so many ranks. Throws if there are not
/// as many GPUs.
void start_ranks_on_gpus(int count, char** argv);

#pragma once

// For programs that may run as several ranks but behave like one: rank 0 writes all files and messages. In a group of
// one, these functions communicate nothing.

#include <exception>
#include <functional>

#include <mica/core/rng.h>
#include <mica/distributed/group.h>

namespace mica::train {

/// Ends a rank after an error that rank 0 reports.
class StoppedByRank0 : public std::exception {
 public:
  const char* what() const noexcept override { return "stopped by rank 0"; }
};

/// Calls f on rank 0 only. If it throws there, that exception ends all ranks: the others throw StoppedByRank0. All
/// ranks must call it.
void on_rank_0(const distributed::Group& group, const std::function<void()>& f);

/// Divides the cores of each machine among its ranks, unless OMP_NUM_THREADS is set. All ranks must call it.
void share_cores(const distributed::Group& group);

/// Maps rank 0's random state to that of this rank's own stream, so that dropout differs among the ranks. Returns rank
/// 0's state on rank 0.
PhiloxKey random_stream_of(int rank, PhiloxKey key);

}  // namespace mica::train

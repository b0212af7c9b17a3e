#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <mica/distributed/detail/transport/collectives.h>

namespace mica::distributed::detail {

/// The ranks of an MPI communicator. Only mpi.cpp includes MPI's header.
class MpiCollectives : public Collectives {
 public:
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// The members' ranks in the world, in the order of this group.
  virtual const std::vector<int>& members() const = 0;
  /// The index of this rank among those on this machine, and their number. All ranks must call local().
  struct Local {
    int rank;
    int size;
  };
  virtual Local local() const = 0;
  virtual std::shared_ptr<Transfer> barrier() = 0;
  /// The ranks that pass this color. All ranks must call it.
  virtual std::shared_ptr<MpiCollectives> split(int color, int key) = 0;
};

/// The processes that mpirun started. Throws if MPI cannot be initialized. Until mpi_report_failures() is called, waits
/// throw after `start_timeout` seconds: otherwise a rank that hangs while MPI starts would block the others forever.
std::shared_ptr<MpiCollectives> mpi_world(double start_timeout);

/// From now on, a collective that fails does not return by itself: `report` gets the reason, and must ensure that
/// mpi_abort() is called.
void mpi_report_failures(std::function<void(const std::string& reason)> report);

/// Makes all pending and later collectives of MPI throw an Error, "all_reduce: `reason`", even if MPI itself never
/// returns.
void mpi_abort(const std::string& reason);

/// Finalizes MPI if this library has initialized it. First waits until the collectives of all ranks have ended, unless
/// mpi_abort() was called.
void mpi_finalize();

}  // namespace mica::distributed::detail

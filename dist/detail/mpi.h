#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <mica/dist/detail/collectives.h>

namespace mica::dist::detail {

/// The ranks of an MPI communicator. Only mpi.cpp includes MPI's header.
class MpiCollectives : public Collectives {
 public:
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// The ranks of this group in the world.
  virtual const std::vector<int>& members() const = 0;
  /// This rank among those on this machine, and how many there are. All ranks must call it.
  struct Local {
    int rank;
    int size;
  };
  virtual Local local() const = 0;
  virtual std::shared_ptr<Transfer> barrier() = 0;
  /// Those with this color. All ranks must call it.
  virtual std::shared_ptr<MpiCollectives> split(int color, int key) = 0;
};

/// The processes that mpirun started. Throws if MPI cannot be initialized. Until mpi_report_failures(), waits throw
/// after `start_timeout` seconds: a rank that hangs while MPI starts would hold up the others for ever.
std::shared_ptr<MpiCollectives> mpi_world(double start_timeout);

/// From now on, a collective that fails does not end: `report` gets the reason, and must see to it that mpi_abort() is
/// called.
void mpi_report_failures(std::function<void(const std::string& reason)> report);

/// Ends all collectives of MPI that have not ended with an Error, also if MPI itself never returns; so do those that
/// are started later. "all_reduce: `reason`"
void mpi_abort(const std::string& reason);

/// Finalizes MPI, if this library has initialized it. Returns when the collectives of all ranks have ended, or after
/// mpi_abort().
void mpi_finalize();

}  // namespace mica::dist::detail

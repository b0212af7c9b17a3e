#pragma once

#include <memory>

#include <mica/dist/detail/collectives.h>

namespace mica::dist::detail {

/// The ranks of an MPI communicator. Only mpi.cpp includes MPI's header.
class MpiCollectives : public Collectives {
 public:
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual int local_rank() const = 0;  ///< among the ranks on this machine
  virtual std::shared_ptr<Transfer> barrier() = 0;
  /// Those with this color. All ranks must call it.
  virtual std::shared_ptr<MpiCollectives> split(int color, int key) = 0;
};

/// The processes that mpirun started. Throws if MPI cannot be initialized.
std::shared_ptr<MpiCollectives> mpi_world();

}  // namespace mica::dist::detail

#pragma once

#include <string>

namespace mica::distributed::detail {

/// The position of this process in its run, according to the launcher's environment variables.
struct Placement {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  std::string launcher{};  ///< "mpirun", "Slurm", "torchrun"; empty for a process that was started alone
  bool has_mpi = false;    ///< whether the launcher started the processes for MPI
};

/// Reads the environment. Throws an Error that names a variable with an impossible value.
Placement placement_from_environment();

}  // namespace mica::distributed::detail

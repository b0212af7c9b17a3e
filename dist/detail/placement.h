#pragma once

#include <string>

namespace mica::dist::detail {

/// This process among those of its run, as the launcher's variables say.
struct Placement {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  std::string launcher{};  ///< "mpirun", "Slurm", "torchrun"; empty for a process that was started alone
};

/// Reads the environment. Throws an Error that names a variable with an impossible value.
Placement placement_from_environment();

}  // namespace mica::dist::detail

#include <charconv>
#include <cstdlib>
#include <limits>
#include <optional>
#include <string_view>

#include <mica/core/check.h>
#include <mica/distributed/detail/network/placement.h>

namespace mica::distributed::detail {

namespace {

constexpr int most_ranks = 1 << 16;  // rank 0 has a connection to each

std::optional<int> number(const char* variable) {
  const char* const value = std::getenv(variable);
  if (value == nullptr || *value == '\0') {
    return std::nullopt;
  }
  const std::string_view text = value;
  int result = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), result);
  check(error == std::errc{} && end == text.data() + text.size() && result >= 0,
        "world: expected the variable {} to be a number of processes, got \"{}\"", variable, text);
  return result;
}

/// The environment variables that a launcher sets in each process.
struct Launcher {
  const char* name;
  const char* rank;
  const char* size;
  const char* local_rank;
};

// torchrun first: its processes may have been started inside a job of Slurm or of mpirun.
constexpr Launcher launchers[] = {
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"},
    {"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"},
    {"mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"},
    // A shell that salloc or sbatch started has SLURM_NTASKS; only srun's processes have SLURM_STEP_NUM_TASKS.
    {"Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"},
};

}  // namespace

Placement placement_from_environment() {
  for (const Launcher& launcher : launchers) {
    const std::optional<int> rank = number(launcher.rank);
    const std::optional<int> size = number(launcher.size);
    if (!rank || !size) {
      continue;
    }
    const int local = number(launcher.local_rank).value_or(*rank);
    check(*size <= most_ranks, "world: expected {} up to {}, got {}", launcher.size, most_ranks, *size);
    check(*size >= 1 && *rank < *size, "world: expected {} below {}, got {} and {}", launcher.rank, launcher.size,
          *rank, *size);
    const std::string name = launcher.name;
    // A step of Slurm has MPI if srun --mpi=pmix or pmi2 started it; the latter sets mpirun's variables.
    const bool has_mpi = name == "mpirun" || (name == "Slurm" && std::getenv("PMIX_NAMESPACE") != nullptr);
    return {.rank = *rank, .size = *size, .local_rank = local, .launcher = name, .has_mpi = has_mpi};
  }
  return {};
}

}  // namespace mica::distributed::detail

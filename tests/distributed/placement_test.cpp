#include <gtest/gtest.h>
#include <tests/distributed/support.h>

#include <mica/distributed/detail/network/placement.h>

namespace mica::distributed::detail {
namespace {

TEST(Placement, ReadsTheVariablesOfLaunchers) {
  EXPECT_EQ(placement_from_environment().size, 1);
  {
    const Variables mpirun(
        {{"OMPI_COMM_WORLD_RANK", "5"}, {"OMPI_COMM_WORLD_SIZE", "8"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}});
    const Placement placement = placement_from_environment();
    EXPECT_EQ(placement.rank, 5);
    EXPECT_EQ(placement.size, 8);
    EXPECT_EQ(placement.local_rank, 1);
    EXPECT_EQ(placement.launcher, "mpirun");
    EXPECT_TRUE(placement.has_mpi);
  }
  {
    // In a process of srun --mpi=pmix.
    const Variables torchrun({{"RANK", "1"},
                              {"WORLD_SIZE", "2"},
                              {"LOCAL_RANK", "1"},
                              {"SLURM_PROCID", "0"},
                              {"PMIX_NAMESPACE", "slurm.pmix.7.0"}});
    const Placement placement = placement_from_environment();
    EXPECT_EQ(placement.launcher, "torchrun");
    EXPECT_FALSE(placement.has_mpi);
  }
  {
    // A shell inside a job, not a process of a step.
    const Variables slurm({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}});
    EXPECT_EQ(placement_from_environment().size, 1);
  }
  {
    // What srun of Slurm 22.05 sets, with --mpi=pmix or without MPI.
    const Variables slurm({{"SLURM_JOB_ID", "7"},
                           {"SLURM_STEP_ID", "0"},
                           {"SLURM_NTASKS", "2"},
                           {"SLURM_STEP_NUM_TASKS", "2"},
                           {"SLURM_STEP_NODELIST", "vm"},
                           {"SLURM_PROCID", "1"},
                           {"SLURM_LOCALID", "1"}});
    const Placement placement = placement_from_environment();
    EXPECT_EQ(placement.rank, 1);
    EXPECT_EQ(placement.size, 2);
    EXPECT_EQ(placement.local_rank, 1);
    EXPECT_EQ(placement.launcher, "Slurm");
    EXPECT_FALSE(placement.has_mpi);
    {
      const Variables pmix({{"PMIX_NAMESPACE", "slurm.pmix.7.0"}, {"PMIX_RANK", "1"}});
      EXPECT_TRUE(placement_from_environment().has_mpi);
    }
    // --mpi=pmi2 has variables as MPICH's mpirun sets.
    const Variables pmi2({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}});
    EXPECT_EQ(placement_from_environment().launcher, "mpirun");
  }
  {
    const Variables torchrun({{"RANK", "0"}, {"WORLD_SIZE", "1000000000"}});
    EXPECT_EQ(message_of([] { placement_from_environment(); }),
              "world: expected WORLD_SIZE up to 65536, got 1000000000");
  }
  {
    const Variables torchrun({{"RANK", "2"}, {"WORLD_SIZE", "2"}});
    EXPECT_EQ(message_of([] { placement_from_environment(); }), "world: expected RANK below WORLD_SIZE, got 2 and 2");
  }
  {
    const Variables torchrun({{"RANK", "one"}, {"WORLD_SIZE", "2"}});
    EXPECT_EQ(message_of([] { placement_from_environment(); }),
              "world: expected the variable RANK to be a number of processes, got \"one\"");
  }
}

}  // namespace
}  // namespace mica::distributed::detail

#include <gtest/gtest.h>

#include <cstdlib>
#include <utility>

#include <mica/autograd/grad_mode.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/distributed/detail/network/placement.h>
#include <mica/distributed/group.h>

namespace mica::distributed {
namespace {

// The collectives among several ranks are tested in tests/ranks/.

std::string message_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Group, OfOneChangesNothing) {
  const Group group;
  EXPECT_EQ(group.rank(), 0);
  EXPECT_EQ(group.size(), 1);
  const Tensor x = from_data<float>({1, 2, 3}, {3});
  group.all_reduce(x, Reduction::mean);
  group.broadcast(x);
  group.barrier();
  EXPECT_EQ(to_vector<float>(x), (std::vector<float>{1, 2, 3}));
  const Tensor y = zeros({3, 1});
  group.all_gather(x, y);
  EXPECT_EQ(to_vector<float>(y), (std::vector<float>{1, 2, 3}));
  const Tensor z = zeros({3});
  group.start_reduce_scatter(x, z).wait();
  EXPECT_EQ(to_vector<float>(z), (std::vector<float>{1, 2, 3}));
  EXPECT_EQ(group.split(7).size(), 1);
}

TEST(Group, ThrowsAfterAMove) {
  Group from;
  const Group to = std::move(from);
  const std::string message = "Group: used after it was moved from";
  // NOLINTBEGIN(bugprone-use-after-move)
  EXPECT_EQ(message_of([&] { (void)from.size(); }), message);
  EXPECT_EQ(message_of([&] { from.all_reduce(zeros({2})); }), message);
  EXPECT_EQ(message_of([&] { from.barrier(); }), message);
  EXPECT_EQ(message_of([&] { (void)from.split(0); }), message);
  // NOLINTEND(bugprone-use-after-move)
  EXPECT_EQ(to.size(), 1);
}

TEST(Group, WorldOfAProcessStartedAlone) {
  EXPECT_EQ(world().size(), 1);
  EXPECT_EQ(local_rank(), 0);
}

TEST(Group, RefusesTensorsThatItCannotUse) {
  const Group group;
  EXPECT_EQ(message_of([&] { group.all_reduce({}); }), "all_reduce: expected a tensor, got an undefined one");
  const Tensor matrix = zeros({2, 3});
  EXPECT_EQ(message_of([&] {
              group.all_reduce(as_strided(matrix, {3, 2}, {1, 3}, 0));
            }),
            "all_reduce: expected a contiguous tensor, got one of shape [3, 2] and strides [1, 3]");
  EXPECT_EQ(message_of([&] { group.all_reduce(zeros({2}, int64), Reduction::mean); }),
            "all_reduce: expected a floating dtype for a mean, got int64");
  EXPECT_EQ(message_of([&] { group.all_reduce(zeros({2}, boolean)); }),
            "all_reduce: expected numbers for a sum, got bool");
  for (const int reduction : {-1, 4, 77}) {
    const std::string expected = fmt::format("expected sum, mean, min or max, got Reduction({})", reduction);
    EXPECT_EQ(message_of([&] { group.all_reduce(matrix, static_cast<Reduction>(reduction)); }),
              "all_reduce: " + expected);
    EXPECT_EQ(message_of([&] { group.reduce_scatter(matrix, zeros({6}), static_cast<Reduction>(reduction)); }),
              "reduce_scatter: " + expected);
  }
  EXPECT_EQ(
      message_of([&] { group.all_gather(zeros({2}), zeros({3})); }),
      "all_gather: expected tensors of one dtype and device, one with 1 times the elements of the other, as there "
      "are 1 ranks; got [3] of float32 on cpu and [2] of float32 on cpu");
  EXPECT_EQ(message_of([&] { group.broadcast(matrix, 1); }), "broadcast: expected a root in [0, 1), got 1");
  EXPECT_EQ(message_of([&] { group.split(-1); }), "split: expected color >= 0, got -1");
  matrix.requires_grad_();
  EXPECT_NE(message_of([&] { group.broadcast(matrix); }).find("requires a gradient"), std::string::npos);
  const autograd::NoGrad guard;
  group.broadcast(matrix);
}

// Sets variables of the environment until the end of scope.
class Environment {
 public:
  explicit Environment(const std::vector<std::pair<const char*, const char*>>& variables) {
    for (const auto& [name, value] : variables) {
      names_.emplace_back(name);
      setenv(name, value, 1);
    }
  }
  ~Environment() {
    for (const char* const name : names_) {
      unsetenv(name);
    }
  }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;

 private:
  std::vector<const char*> names_;
};

TEST(Placement, ReadsTheVariablesOfLaunchers) {
  EXPECT_EQ(detail::placement_from_environment().size, 1);
  {
    const Environment mpirun(
        {{"OMPI_COMM_WORLD_RANK", "5"}, {"OMPI_COMM_WORLD_SIZE", "8"}, {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}});
    const detail::Placement placement = detail::placement_from_environment();
    EXPECT_EQ(placement.rank, 5);
    EXPECT_EQ(placement.size, 8);
    EXPECT_EQ(placement.local_rank, 1);
    EXPECT_EQ(placement.launcher, "mpirun");
    EXPECT_TRUE(placement.has_mpi);
  }
  {
    // In a process of srun --mpi=pmix.
    const Environment torchrun({{"RANK", "1"},
                                {"WORLD_SIZE", "2"},
                                {"LOCAL_RANK", "1"},
                                {"SLURM_PROCID", "0"},
                                {"PMIX_NAMESPACE", "slurm.pmix.7.0"}});
    const detail::Placement placement = detail::placement_from_environment();
    EXPECT_EQ(placement.launcher, "torchrun");
    EXPECT_FALSE(placement.has_mpi);
  }
  {
    // A shell inside a job, not a process of a step.
    const Environment slurm({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}});
    EXPECT_EQ(detail::placement_from_environment().size, 1);
  }
  {
    // What srun of Slurm 22.05 sets, with --mpi=pmix or without MPI.
    const Environment slurm({{"SLURM_JOB_ID", "7"},
                             {"SLURM_STEP_ID", "0"},
                             {"SLURM_NTASKS", "2"},
                             {"SLURM_STEP_NUM_TASKS", "2"},
                             {"SLURM_STEP_NODELIST", "vm"},
                             {"SLURM_PROCID", "1"},
                             {"SLURM_LOCALID", "1"}});
    const detail::Placement placement = detail::placement_from_environment();
    EXPECT_EQ(placement.rank, 1);
    EXPECT_EQ(placement.size, 2);
    EXPECT_EQ(placement.local_rank, 1);
    EXPECT_EQ(placement.launcher, "Slurm");
    EXPECT_FALSE(placement.has_mpi);
    {
      const Environment pmix({{"PMIX_NAMESPACE", "slurm.pmix.7.0"}, {"PMIX_RANK", "1"}});
      EXPECT_TRUE(detail::placement_from_environment().has_mpi);
    }
    // --mpi=pmi2 has variables as MPICH's mpirun sets.
    const Environment pmi2({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}});
    EXPECT_EQ(detail::placement_from_environment().launcher, "mpirun");
  }
  {
    const Environment torchrun({{"RANK", "0"}, {"WORLD_SIZE", "1000000000"}});
    EXPECT_EQ(message_of([] { detail::placement_from_environment(); }),
              "world: expected WORLD_SIZE up to 65536, got 1000000000");
  }
  {
    const Environment torchrun({{"RANK", "2"}, {"WORLD_SIZE", "2"}});
    EXPECT_EQ(message_of([] { detail::placement_from_environment(); }),
              "world: expected RANK below WORLD_SIZE, got 2 and 2");
  }
  {
    const Environment torchrun({{"RANK", "one"}, {"WORLD_SIZE", "2"}});
    EXPECT_EQ(message_of([] { detail::placement_from_environment(); }),
              "world: expected the variable RANK to be a number of processes, got \"one\"");
  }
}

}  // namespace
}  // namespace mica::distributed

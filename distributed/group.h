#pragma once

// Groups of processes ("ranks") that train one model together, and their collective operations.

#include <memory>
#include <string>

#include <mica/core/detail/shared_state.h>
#include <mica/core/tensor.h>
#include <mica/distributed/reduction.h>

namespace mica::distributed {

namespace detail {
class Transfer;
struct GroupState;
}  // namespace detail

/// A collective that was started by Group::start_…(). A default-constructed one is complete. Copies are handles to the
/// same collective.
class Work {
 public:
  Work() = default;
  explicit Work(std::shared_ptr<detail::Transfer> transfer) : transfer_(std::move(transfer)) {}
  // A move copies: a Work that was moved from would be complete.
  Work(const Work&) = default;
  Work& operator=(const Work&) = default;

  /// On the CPU, returns when this rank's tensors have the result. On a GPU, makes the current stream wait, but
  /// not the host: if a rank fails later, the next copy from the GPU to the host throws. If the collective failed,
  /// each call throws its Error. Destroying a Work does not wait; the collective continues and keeps its tensors
  /// alive.
  void wait() const;

 private:
  std::shared_ptr<detail::Transfer> transfer_;
};

/// Processes that take part in collectives together. Copying a Group copies the handle. All members also work with a
/// group of one process, so a program needs no special case for it.
///
///     const distributed::Group group = distributed::world();  // all processes that mpirun started, or this one alone
///     group.all_reduce(loss, distributed::Reduction::mean);
///     if (group.rank() == 0) fmt::print("loss {}\n", loss.item());
///
/// Tensors on the CPU are sent over MPI or, without it, over TCP, which is slow; tensors on a GPU over NCCL. All ranks
/// must call the same collectives in the same order, with tensors of the same size and dtype. The tensors must be
/// contiguous; they are written in place, and nothing is recorded for backward. Results have the same bits on each
/// rank, and in each run with the same layout of ranks. With NCCL on GPUs that an NVSwitch connects, this requires
/// NCCL_NVLS_ENABLE=0 (docs/distributed.md).
///
/// Each collective has an asynchronous form, start_…(), which returns at once. Do not read or write its tensors before
/// Work::wait() has returned. On a GPU, it runs on a separate stream, after the work that is already queued on the
/// current stream.
///
/// Collectives of tensors on a GPU can be captured in a CUDA graph, except for a group's first one, and each replay
/// repeats them. All ranks must capture the same ones, wait for each of them before the capture ends, and replay them
/// in the same order relative to other collectives.
class Group {
 public:
  /// A group of this process alone.
  Group();
  explicit Group(std::shared_ptr<const detail::GroupState> state) : state_("Group", std::move(state)) {}

  /// In [0, size()).
  int rank() const;
  int size() const;

  /// Combines x, of any shape, elementwise over all ranks, and writes the result to x on each. Float16 and bfloat16 are
  /// rounded after each addition. `min` and `max` of elements of which one is NaN are NaN on the CPU; NCCL promises no
  /// result for them. Throws for a `mean` of integers and a sum of booleans.
  void all_reduce(const Tensor& x, Reduction reduction = Reduction::sum) const;
  Work start_all_reduce(const Tensor& x, Reduction reduction = Reduction::sum) const;

  /// Combines `from` over all ranks and divides the result into size() equal parts; rank r gets part r in `into`.
  /// from.numel() must be size() · into.numel(). `into` may be part rank() of `from`.
  void reduce_scatter(const Tensor& from, const Tensor& into, Reduction reduction = Reduction::sum) const;
  Work start_reduce_scatter(const Tensor& from, const Tensor& into, Reduction reduction = Reduction::sum) const;

  /// Concatenates `from` of all ranks in `into`, on each rank: part r is from rank r. into.numel() must be size() ·
  /// from.numel(). `from` may be part rank() of `into`.
  void all_gather(const Tensor& from, const Tensor& into) const;
  Work start_all_gather(const Tensor& from, const Tensor& into) const;

  /// Copies x of rank `root` to x of all ranks.
  void broadcast(const Tensor& x, int root = 0) const;
  Work start_broadcast(const Tensor& x, int root = 0) const;

  /// Returns when all ranks have called it. Does not wait for GPUs.
  void barrier() const;

  /// Divides this group into groups of the ranks that pass the same color, ordered by key and then by rank, and returns
  /// that of this rank. All ranks of this group must call it. color ≥ 0.
  Group split(int color, int key = 0) const;

 private:
  mica::detail::SharedState<const detail::GroupState> state_;
};

/// All processes of this run: those that mpirun, srun or torchrun started, or else this one alone. The first call
/// connects them. Throws an Error if this process was started as one of several, but cannot reach the others. Without
/// MPI (under torchrun, or srun without --mpi), tensors on the CPU are sent through rank 0 over TCP, which is meant for
/// small tensors.
///
/// When a rank dies, hangs, fails, loses its connection, leaves early or calls different collectives from the others,
/// all pending and later collectives of the other ranks throw an Error that names it. So do copies from a GPU to the
/// host, since collectives that were running on the GPU have ended with wrong values. See docs/distributed.md.
Group world();

/// A task that this rank does alone, such as writing a checkpoint or a long validation. While this object exists, the
/// other ranks wait for this one without a timeout. Does nothing in a run of one process.
///
///     const distributed::LongTask task("checkpoint");
class LongTask {
 public:
  explicit LongTask(const std::string& name);
  ~LongTask();
  LongTask(const LongTask&) = delete;
  LongTask& operator=(const LongTask&) = delete;

 private:
  bool told_ = false;
};

/// Sets how long ranks wait for another rank in a collective before they consider it hung, in seconds; 0: forever. Rank
/// 0's value applies. The default is MICA_DIST_TIMEOUT from the environment, or 20.
void set_timeout(double seconds);

/// Tells the other ranks that this one has failed and is about to exit, and why: their collectives, and this rank's,
/// throw an Error that says so. For programs that catch the exceptions that end them. Other programs need not call it:
/// uncaught exceptions, exit statuses other than 0 and killed processes are detected anyway.
void report_failure(const std::string& reason);

/// The index of this process among the run's processes on this machine, from 0. Use it as the index of the GPU.
int local_rank();

}  // namespace mica::distributed

#pragma once

// Groups of processes that compute one thing together: the ranks of a run, each with its share of the data.

#include <memory>
#include <string>

#include <mica/core/tensor.h>

namespace mica::dist {

namespace detail {
class Transfer;
struct GroupState;
}  // namespace detail

/// How a collective combines the ranks' elements. `mean` is the sum divided by the number of ranks.
enum class Reduction { sum, mean, min, max };

/// A collective that was started. A default-constructed one has ended.
class Work {
 public:
  Work() = default;
  explicit Work(std::shared_ptr<detail::Transfer> transfer) : transfer_(std::move(transfer)) {}

  /// On the CPU, returns when this rank's part is done: its tensors have the result. On a GPU, the current stream waits
  /// and the host does not: if a rank fails then, the next copy from the GPU to the host throws. Throws the Error with
  /// which the collective ended, at each call. A Work that is destroyed does not wait; the collective goes on and keeps
  /// its tensors alive.
  void wait() const;

 private:
  std::shared_ptr<detail::Transfer> transfer_;
};

/// Processes that take part in collectives together. Copying a Group copies the handle. A group of one process does
/// nothing where nothing has to be done, so a program needs no second version for it.
///
///     const dist::Group group = dist::world();  // of one process, or of those that mpirun started
///     group.all_reduce(loss, dist::Reduction::mean);
///     if (group.rank() == 0) fmt::print("loss {}\n", loss.item());
///
/// Tensors on the CPU travel over MPI, or without it, slowly, over TCP; tensors on a GPU over NCCL. All ranks must call
/// the same collectives in the same order, with tensors of the same size and dtype. The tensors must be contiguous;
/// they are written in place, and nothing is recorded for backward. The results are the same bits on each rank, and in
/// each run with the same layout of ranks: over NCCL, where an NVSwitch connects GPUs, with NCCL_NVLS_ENABLE=0
/// (docs/distributed.md).
///
/// Each collective also comes as start_…(), which returns at once. Until its Work has been waited for, neither read nor
/// write its tensors. On a GPU, it waits for the work that is queued on the current stream, and runs on a stream of its
/// own.
class Group {
 public:
  /// A group of this process alone.
  Group();
  explicit Group(std::shared_ptr<const detail::GroupState> state) : state_(std::move(state)) {}

  /// In [0, size()).
  int rank() const;
  int size() const;

  /// Combines x of all ranks, of any shape; each gets the result. Float16 and bfloat16 are rounded after each addition.
  /// Throws for a `mean` of integers and a sum of booleans.
  void all_reduce(const Tensor& x, Reduction reduction = Reduction::sum) const;
  Work start_all_reduce(const Tensor& x, Reduction reduction = Reduction::sum) const;

  /// Combines `from` of all ranks; rank r gets part r of the result in `into`. from.numel() is size() · into.numel().
  /// `into` may be that part of `from`.
  void reduce_scatter(const Tensor& from, const Tensor& into, Reduction reduction = Reduction::sum) const;
  Work start_reduce_scatter(const Tensor& from, const Tensor& into, Reduction reduction = Reduction::sum) const;

  /// Writes `from` of rank r into part r of `into`, on each rank. into.numel() is size() · from.numel(). `from` may be
  /// part rank() of `into`.
  void all_gather(const Tensor& from, const Tensor& into) const;
  Work start_all_gather(const Tensor& from, const Tensor& into) const;

  /// Writes x of rank `root` into x of all ranks.
  void broadcast(const Tensor& x, int root = 0) const;
  Work start_broadcast(const Tensor& x, int root = 0) const;

  /// Returns when all ranks have called it. Does not wait for GPUs.
  void barrier() const;

  /// The ranks that pass the same color, ordered by key and then by rank, as a group of their own. All ranks of this
  /// group must call it. color ≥ 0.
  Group split(int color, int key = 0) const;

 private:
  std::shared_ptr<const detail::GroupState> state_;
};

/// All processes of this run. The first call finds them: those that mpirun, srun or torchrun started; else a group of
/// one. Throws an Error if this process was started as one of several, but cannot reach the others. Without MPI (under
/// torchrun, or srun without --mpi), tensors on the CPU travel through rank 0 over TCP, which is meant for small ones.
///
/// When a rank dies, hangs, fails, loses its link, leaves early or calls other collectives than the others, all pending
/// and later collectives of the other ranks throw an Error that names it, and so do copies from a GPU to the host, as
/// collectives that were running there have ended with wrong values; docs/distributed.md says more.
Group world();

/// A task that this rank does alone, such as writing a checkpoint or a long validation. While it lives, the other ranks
/// wait for this one without the timeout. Does nothing in a group of one.
///
///     const dist::LongTask task("checkpoint");
class LongTask {
 public:
  explicit LongTask(const std::string& name);
  ~LongTask();
  LongTask(const LongTask&) = delete;
  LongTask& operator=(const LongTask&) = delete;

 private:
  bool told_ = false;
};

/// How long ranks wait for another one in a collective before they give it up, in seconds; 0: for ever. Rank 0's
/// counts. Without this call: MICA_DIST_TIMEOUT, else 20.
void set_timeout(double seconds);

/// Tells the other ranks that this one has failed and will end, and why: their collectives throw an Error that says so,
/// as do this rank's. For programs that catch the exceptions that end them. Others need not call it: the other ranks
/// learn of an exception that nobody catches, of an exit status other than 0, and of a process that dies.
void report_failure(const std::string& reason);

/// The number of this process among those of the run on this machine, from 0. Says which GPU to use.
int local_rank();

}  // namespace mica::dist

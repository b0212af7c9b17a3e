#pragma once

// Data parallel training: each rank computes the gradients for its part of the batch.

#include <cstdint>
#include <memory>
#include <optional>

#include <mica/distributed/group.h>
#include <mica/nn/module.h>

namespace mica::distributed {

struct DataParallelOptions {
  /// Gradients of one dtype and device are reduced together, in buffers of at most this size; a larger gradient has a
  /// buffer of its own.
  std::int64_t bucket_bytes = 25 << 20;
  /// float32: sums float16 and bfloat16 gradients in float32 and rounds the mean once, instead of after each addition.
  /// Moves twice the bytes.
  std::optional<DType> reduce_dtype{};
  /// wait() calls check() every this many steps; 0: never.
  std::int64_t check_every = 1000;
  /// For finding a rank that diverges: wait() throws an Error that names the rank and the parameter if a gradient is
  /// not finite. It checks before averaging, which would spread the fault to all ranks. On a GPU, the host waits for
  /// each gradient. Do not combine with a GradScaler, which expects infinities.
  bool check_gradients = false;
};

/// Averages the gradients of a module over the ranks of a group. If the loss is a mean over the rank's part of the
/// batch, and the parts have the same size, the averages are the gradients for the whole batch.
///
///     distributed::DataParallel parallel(model, distributed::world());
///     optim::AdamW optimizer(model.parameters());
///     for (…) {
///       loss_of(model, my_part_of(batch)).backward();
///       parallel.wait();
///       optimizer.step();
///       optimizer.zero_grad();
///     }
///
/// The constructor copies the parameters and buffers of rank 0 to all ranks. Gradients are grouped into buckets in a
/// fixed order, the reverse order of registration, in which backward roughly produces them. Backward starts the
/// reduction of a bucket as soon as its gradients and the buckets before it are complete, so that communication and
/// computation overlap. If a parameter got no gradient, only wait() starts its bucket and those after it: so freeze
/// parameters that are not trained (requires_grad_(false)) before constructing this.
///
/// Between backward and wait(), gradients whose reduction has started are undefined tensors; then all gradients of a
/// bucket are views of one buffer. Register post-accumulate hooks on the parameters before constructing this; they see
/// this rank's gradients. Hooks registered later may find the gradient removed.
///
/// With a group of one, it does nothing. With several ranks, the means have the same bits on each rank and in each run
/// with the same layout of ranks. All ranks must call the constructor, wait() and check() together. Does not support
/// backward on two threads at once. Construct it when the module has all its parameters, with their final dtype and
/// device. The module may be moved or destroyed.
///
/// On GPUs, backward and wait() can be captured together in a CUDA graph, after a first step without one. Each replay
/// counts as a wait(). Throws during a capture if a parameter has no gradient, and with check_gradients, since both
/// need the host.
///
/// While a DataParallel of several ranks exists, a backward that throws may have changed gradients. If the program
/// continues, the rank must still call wait(), as the others do, and discard the gradients.
class DataParallel {
 public:
  /// Throws an Error that names the rank and the parameter if the ranks disagree on names, shapes or dtypes, or on the
  /// options; if a parameter is in another DataParallel; for bad options.
  DataParallel(const nn::Module& module, const Group& group, DataParallelOptions options = {});
  ~DataParallel();
  DataParallel(DataParallel&&) noexcept;
  DataParallel(const DataParallel&) = delete;
  DataParallel& operator=(DataParallel&&) = delete;
  DataParallel& operator=(const DataParallel&) = delete;

  /// Call it after backward and before the optimizer's step. Makes each grad the mean over the ranks. If only some
  /// ranks have a gradient for a parameter, it counts as zero on the others; if none has, it stays undefined. Throws if
  /// a collective fails.
  void wait() const;
  /// Forgets a backward after which wait() will not be called: gradients whose reduction has started are lost. For a
  /// step that failed on all ranks, such as one that could not be captured. Does not communicate, but all ranks must
  /// call it.
  void discard() const;

  struct State;
  class [[nodiscard]] Accumulating;
  /// Until the end of scope, backward only adds to the gradients of this rank. Use it for all backward passes of a step
  /// except the last:
  ///
  ///     for (int i = 0; i < passes; ++i) {
  ///       const auto guard = parallel.accumulate(i + 1 < passes);
  ///       (loss_of(model, part(i)) / passes).backward();
  ///     }
  ///     parallel.wait();
  ///
  /// Without it, a second backward that reaches the same parameter before wait() is an Error.
  Accumulating accumulate(bool on = true) const;

  /// Checks that all ranks pass the same step and have the same bits in all parameters. Otherwise throws an Error that
  /// names the rank, and the parameter that differs. Compares hashes, which are computed on the parameters' device;
  /// waits for the device.
  void check(std::int64_t step) const;

  /// The number of buckets, and how many of their reductions have started since the last wait(); 0 with a group of one.
  int buckets() const;
  int started() const;

 private:
  mica::detail::SharedState<State> state_;
};

/// Returned by DataParallel::accumulate().
class [[nodiscard]] DataParallel::Accumulating {
 public:
  explicit Accumulating(std::shared_ptr<State> state);
  ~Accumulating();
  Accumulating(const Accumulating&) = delete;
  Accumulating& operator=(const Accumulating&) = delete;

 private:
  std::shared_ptr<State> state_;  // null: does nothing
};

}  // namespace mica::distributed

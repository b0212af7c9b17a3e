#pragma once

// AdamW whose optimizer states are divided among the ranks of a group.

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <mica/autograd/early_accumulation.h>
#include <mica/autograd/hooks.h>
#include <mica/distributed/group.h>
#include <mica/optim/adamw.h>

namespace mica::distributed {

/// How ShardedAdamW communicates.
struct ShardingOptions {
  /// Maximum size of a bucket. Gradients are reduced and weights gathered in buckets of whole parameters, in the
  /// parameters' dtype. A larger parameter has a bucket of its own.
  std::int64_t bucket_bytes = std::int64_t{25} << 20;
  /// float32 or float64: the dtype in which 16-bit gradients are summed; the mean is rounded once. If not set, they are
  /// summed in their own dtype, and each addition rounds.
  std::optional<DType> reduce_dtype{};
  /// Backward starts the reduction of a bucket, and removes its gradients, as soon as they and the buckets before it
  /// are complete, so that communication and computation overlap. Run all backward passes of a step but the last under
  /// accumulate(). The order of the buckets is taken from the first backward of rank 0, so they overlap well from the
  /// second step on. If a parameter got no gradient, only step() starts its bucket and those after it. The parameters
  /// must be in no DataParallel and no other autograd::EarlyAccumulation, whose limits apply.
  bool overlap = false;
  /// step() returns while the new weights are still being gathered, roughly in the order in which the next forward
  /// needs them. Accessing the elements of a weight, through any handle or view, first waits for its bucket; on a GPU,
  /// the current stream waits. So the weights of the last layers are sent while the first ones compute. Two kinds of
  /// access do not wait: through a pointer taken before step() (data(), to_dlpack()), and on a stream other than the
  /// one that waited. Call wait() before these.
  bool overlap_gather = false;
  /// Like DataParallelOptions::check_gradients, but step() throws.
  bool check_gradients = false;
};

/// optim::AdamW for data parallel training that divides its states among the ranks, instead of keeping all of them on
/// each (ZeRO stage 1; Rajbhandari et al., 2020, arXiv:1910.02054). Replaces DataParallel:
///
///     distributed::ShardedAdamW optimizer(optim::AdamW::decay_matrices(model.parameters(), {.lr = 3e-4}),
///     distributed::world()); loss_of(rows_of_this_rank).backward();  // the mean over the rows; once or, to
///     accumulate, several times optimizer.step({.max_grad_norm = 1.0}); optimizer.zero_grad();
///
/// step() averages the gradients over the ranks, updates this rank's shard of the elements, and sends the new weights
/// to all ranks. For equal gradients, the weights have the same bits as with AdamW. With clipping, this holds as far as
/// the norms are equal: their float64 sums are taken in different orders. With a group of one, this is optim::AdamW.
///
/// Memory. A bucket holds P parameters of nᵢ elements of s bytes, each aligned to a = 256 / s elements, and is divided
/// into N equal parts, one per rank. A rank updates, and keeps the states of, at most
///
///     part = ⌈Σᵢ ⌈nᵢ / a⌉ / N⌉ · a    elements of a bucket,
///
/// which exceeds Σ nᵢ / N by at most (P / N + 1) · a. Padding has no states. States take 8 bytes per element, 12 with
/// master weights, 16 in float64; summed over the ranks, that is what AdamW takes. A step also needs the reduced
/// gradients of the parts, and two buckets for gradients that are being reduced. Each rank has all weights, and all
/// gradients unless `overlap` removes them bucket by bucket.
///
/// The parameters become views of the buckets. So move and convert the model first: after a later set_data() on a
/// parameter, step() throws. Parameters of one bucket share a version: after writing one in place, the backward of a
/// graph that saved another one throws.
///
/// The constructor, step(), state_dict() and load_state_dict() are collective: all ranks of the group call them, in the
/// same order and with the same arguments. If the arguments of a rank are wrong, all ranks throw, and nothing has
/// changed. These checks exchange small tensors on the CPU.
class ShardedAdamW {
 public:
  /// Copies the parameters of rank 0 to all ranks. Throws for the errors of optim::AdamW, for parameters on several
  /// devices, and if ranks have different parameters or options; the message names the rank and the parameter.
  explicit ShardedAdamW(const std::vector<optim::AdamW::Group>& groups, const Group& group = world(),
                        ShardingOptions sharding = {});
  explicit ShardedAdamW(const Tensors& parameters, optim::AdamWOptions options = {}, const Group& group = world(),
                        ShardingOptions sharding = {});
  ~ShardedAdamW();
  ShardedAdamW(const ShardedAdamW&) = delete;
  ShardedAdamW& operator=(const ShardedAdamW&) = delete;

  /// See optim::Optimizer::step(). Uses the mean of the gradients over the ranks. If only some ranks have a gradient
  /// for a parameter, it counts as zero on the others; if none has, the parameter is unchanged. grad() keeps this
  /// rank's gradient, unless ShardingOptions::overlap is set: then step() removes it, and if step() throws, the next
  /// step() still uses the gradient. The returned norm is that of the averaged gradients, on all ranks. With a scaler,
  /// a gradient that is not finite on any rank makes all ranks skip the step; the scalers must have the same scale.
  /// Throws if ranks pass different options, or have different learning rates or numbers of steps.
  ///
  /// On GPUs, a step can be captured in a CUDA graph, with its backward, after a few steps without one; not with
  /// check_gradients, and only if all parameters have a gradient on this rank. A replay ends when the weights have been
  /// gathered, even with overlap_gather, and does not compare the ranks' learning rates.
  Tensor step(const optim::StepOptions& options = {});
  /// Waits for the weights that are still being gathered; on a GPU, the current stream waits. See
  /// ShardingOptions::overlap_gather for when this is needed. If a collective failed, throws its Error, as any access
  /// to such a weight does. Not collective.
  void wait() const;
  /// Removes the gradients of all parameters. With ShardingOptions::overlap, after a backward outside accumulate() and
  /// before step(), it also ends the reductions that backward started, so all ranks must call it.
  void zero_grad();
  /// As DataParallel::discard(), for a backward after which step() will not be called.
  void discard();

  class [[nodiscard]] Accumulating;
  /// Until the end of scope, backward only adds to the gradients of this rank. Has no effect without
  /// ShardingOptions::overlap. With that option, a second backward outside the scope that reaches the same parameter
  /// before step() is an Error.
  ///
  ///     for (int i = 0; i < passes; ++i) {
  ///       const auto guard = optimizer.accumulate(i + 1 < passes);
  ///       (loss_of(part(i)) / passes).backward();
  ///     }
  ///     optimizer.step();
  Accumulating accumulate(bool on = true) const;

  /// As in optim::Optimizer. Not collective, but all ranks must set the same values.
  void set_lr(double lr);
  void set_lr(std::size_t group, double lr);
  double lr(std::size_t group = 0) const;
  std::size_t group_count() const;
  Tensors parameters() const;

  /// The states of whole parameters, in optim::AdamW's form, so that any number of ranks, and optim::AdamW, can load
  /// them. Returns copies on the CPU, on all ranks; with `only_rank`, on that rank only, and an empty StateDict on the
  /// others. A group of one gets handles, not copies.
  StateDict state_dict(std::optional<int> only_rank = {}) const;
  /// Copies this rank's shard of `state`. Each rank passes the whole states, from state_dict() without only_rank or
  /// from optim::AdamW. Throws one Error for any mismatch, without changing anything.
  void load_state_dict(const StateDict& state);

  /// Bytes of the states and master weights that this rank keeps. Not collective; waits for the device.
  std::size_t state_bytes() const;

 private:
  class Shard;
  struct Parameter;
  struct Bucket;

  void check_ranks_agree(const std::vector<optim::AdamW::Group>& groups, const ShardingOptions& sharding,
                         const std::exception_ptr& error) const;
  void make_buckets(const Tensors& parameters, std::int64_t bucket_bytes);
  void fill(Bucket& bucket);
  void look_for_fault(std::size_t i) const;
  void check_step(const optim::StepOptions& options) const;
  std::vector<bool> agree_on_step(const optim::StepOptions& options) const;
  void arrived(std::size_t i);
  void start_reduction(Bucket& bucket);
  void finish_reduction(Bucket& bucket) const;
  void reduce_gradients(const std::vector<bool>& wanted);
  void set_shard_gradients(const std::vector<bool>& has_gradient);
  void learn_order();
  void forget_gradients();
  void gather_weights(const std::vector<bool>& has_gradient);
  StateDict shard_of(const StateDict& state) const;

  Group group_;
  std::optional<DType> reduce_dtype_;
  bool overlap_;
  bool check_gradients_;
  mutable std::string fault_;  // a gradient of this rank that was not finite since the last step; empty: none
  bool overlap_gather_;
  std::shared_ptr<int> accumulating_ = std::make_shared<int>(0);  // number of guards
  std::vector<std::size_t> order_;  // of reductions: indices of buckets; backwards until learn_order()
  bool learned_order_ = false;
  std::size_t started_ = 0;    // the first `started_` buckets of order_ have been started, or are not needed
  std::int64_t complete_ = 0;  // number of buckets whose gradients have all arrived
  std::shared_ptr<std::int64_t> steps_ = std::make_shared<std::int64_t>(0);  // calls of step()
  std::vector<Parameter> parameters_;
  std::vector<Bucket> buckets_;   // in the order of the parameters; empty for a group of one
  std::unique_ptr<Shard> shard_;  // AdamW of this rank's part of each parameter; parts may be empty
  std::unique_ptr<autograd::EarlyAccumulation> early_;  // this and hooks_: only with overlap
  std::vector<autograd::HookHandle> hooks_;
};

/// Returned by ShardedAdamW::accumulate().
class [[nodiscard]] ShardedAdamW::Accumulating {
 public:
  explicit Accumulating(std::shared_ptr<int> count);
  ~Accumulating();
  Accumulating(const Accumulating&) = delete;
  Accumulating& operator=(const Accumulating&) = delete;

 private:
  std::shared_ptr<int> count_;  // null: does nothing
};

}  // namespace mica::distributed

#pragma once

// AdamW whose states are divided among the ranks of a group.

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <mica/autograd/early_accumulation.h>
#include <mica/autograd/hooks.h>
#include <mica/dist/group.h>
#include <mica/optim/adamw.h>

namespace mica::dist {

/// How ShardedAdamW communicates.
struct ShardingOptions {
  /// Gradients are reduced and weights are gathered in buckets of whole parameters that have at most this size, in the
  /// parameters' dtype. A larger parameter is a bucket of its own.
  std::int64_t bucket_bytes = std::int64_t{25} << 20;
  /// float32 or float64: 16-bit gradients are summed in it, and the mean is rounded once. Unset: they are summed in
  /// their own dtype, and each addition rounds.
  std::optional<DType> reduce_dtype{};
  /// Backward starts the reduction of a bucket as soon as its gradients and the buckets before it are complete, so that
  /// communication and computation overlap, and removes them. Run all backward passes of a step but the last under
  /// accumulate(). The order of the buckets is that of the first backward of rank 0, so it is from the second step on
  /// that they overlap well. A bucket with a parameter that got no gradient waits for step(), and so do those after it.
  /// The parameters must be in no DataParallel and no other autograd::EarlyAccumulation, whose limits apply.
  bool overlap = false;
  /// step() returns while the new weights are on their way, about in the order in which the next forward needs them.
  /// Whoever asks a tensor for elements of a weight, by any handle or view, waits for the weight's bucket first; on a
  /// GPU, the current stream waits. So the weights of the last layers travel while the first ones compute, and nothing
  /// can read them too early, except through a pointer from before step() (data(), to_dlpack()) and on another stream
  /// than the one that waited: call wait() first.
  bool overlap_gather = false;
  /// As DataParallelOptions::check_gradients, but step() throws.
  bool check_gradients = false;
};

/// optim::AdamW for data parallel training that keeps its states once among all ranks, not once on each (ZeRO stage 1;
/// Rajbhandari et al., 2020, arXiv:1910.02054). Needs no DataParallel:
///
///     dist::ShardedAdamW optimizer(optim::AdamW::decay_matrices(model.parameters(), {.lr = 3e-4}), dist::world());
///     loss_of(rows_of_this_rank).backward();  // the mean over the rows; once or, to accumulate, several times
///     optimizer.step({.max_grad_norm = 1.0});
///     optimizer.zero_grad();
///
/// step() averages the gradients over the ranks, each rank updates its share of the elements, and all receive the new
/// weights. Elementwise it is AdamW: for equal gradients the weights are the same bits, with clipping as far as the
/// norm is, whose float64 sum has another order. A group of one is optim::AdamW.
///
/// Memory. A bucket holds P parameters of nᵢ elements of s bytes, each from a multiple of a = 256 / s elements on, and
/// is divided into equal parts. Of N ranks, each updates and keeps the states of at most
///
///     part = ⌈Σᵢ ⌈nᵢ / a⌉ / N⌉ · a    elements of a bucket,
///
/// which is Σ nᵢ / N up to (P / N + 1) · a. Padding has no states. An element has 8 bytes of states, with master
/// weights 12, in float64 16; summed over the ranks that is what AdamW keeps. During a step there are in addition the
/// reduced gradients of the parts and two buckets of gradients that are on their way. Weights are whole on each rank,
/// and so are gradients, unless `overlap` removes them bucket by bucket.
///
/// The parameters become views of the buckets. So move and convert the model first; its later set_data() makes step()
/// throw. Parameters of one bucket share a version: writing one in place makes the backward of a graph that saved
/// another throw.
///
/// The constructor, step(), state_dict() and load_state_dict() are collective: all ranks of the group call them, in the
/// same order and with the same arguments. If the arguments of a rank are wrong, all ranks throw, and nothing has
/// changed. These checks travel as small tensors on the CPU.
class ShardedAdamW {
 public:
  /// The parameters get the values of rank 0. Throws for what optim::AdamW refuses, for parameters on several devices,
  /// and if ranks have different parameters or options; the message names the rank and the parameter.
  explicit ShardedAdamW(const std::vector<optim::AdamW::Group>& groups, const Group& group = world(),
                        ShardingOptions sharding = {});
  explicit ShardedAdamW(const Tensors& parameters, optim::AdamWOptions options = {}, const Group& group = world(),
                        ShardingOptions sharding = {});
  ~ShardedAdamW();
  ShardedAdamW(const ShardedAdamW&) = delete;
  ShardedAdamW& operator=(const ShardedAdamW&) = delete;

  /// See optim::Optimizer::step(). Gradients are the means over the ranks; one that only some ranks have counts as zero
  /// on the others, and a parameter for which no rank has one is unchanged. grad() keeps this rank's gradient, unless
  /// ShardingOptions::overlap is set: then step() removes it, also if it throws, and the next step() uses it. The
  /// returned norm is that of the averaged gradients, on all ranks. With a scaler, a gradient that is not finite on any
  /// rank makes all ranks skip the step; the scalers must have the same scale. Throws if ranks pass different options,
  /// or have different learning rates or numbers of steps. Cannot be captured in a CUDA graph by several ranks.
  Tensor step(const optim::StepOptions& options = {});
  /// Waits for the weights that are on their way; on a GPU, the current stream does. Needed only where
  /// ShardingOptions::overlap_gather says so. Throws the Error with which a collective ended, as any use of such a
  /// weight does. Not collective.
  void wait() const;
  /// Removes the gradients of all parameters. With ShardingOptions::overlap and after a backward outside accumulate()
  /// that no step() has followed, it ends the reductions, so all ranks must call it.
  void zero_grad();

  class [[nodiscard]] Accumulating;
  /// Until the end of scope, backward only adds to the gradients of this rank. Makes a difference only with
  /// ShardingOptions::overlap; there, a parameter that a second backward reaches before step() is an Error without it.
  ///
  ///     for (int i = 0; i < passes; ++i) {
  ///       const auto guard = optimizer.accumulate(i + 1 < passes);
  ///       (loss_of(part(i)) / passes).backward();
  ///     }
  ///     optimizer.step();
  Accumulating accumulate(bool on = true) const;

  /// As of optim::Optimizer. Not collective, but all ranks must set the same.
  void set_lr(double lr);
  void set_lr(std::size_t group, double lr);
  double lr(std::size_t group = 0) const;
  std::size_t group_count() const;
  Tensors parameters() const;

  /// The states in optim::AdamW's form, of whole parameters, so it can be loaded by any number of ranks and by
  /// optim::AdamW. Several ranks get copies on the CPU; with `only_rank`, that rank does and the others get an empty
  /// StateDict. A group of one gets handles.
  StateDict state_dict(std::optional<int> only_rank = {}) const;
  /// Copies this rank's share of `state`, which is whole on each rank: of state_dict(), without only_rank, or of
  /// optim::AdamW. Throws one Error for any mismatch, without changing anything.
  void load_state_dict(const StateDict& state);

  /// Bytes of the states and master weights that this rank keeps. Not collective; waits for the device.
  std::size_t state_bytes() const;

 private:
  class Share;
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
  void set_share_gradients(const std::vector<bool>& has_gradient);
  void learn_order();
  void forget_gradients();
  void gather_weights(const std::vector<bool>& has_gradient);
  StateDict share_of(const StateDict& state) const;

  Group group_;
  std::optional<DType> reduce_dtype_;
  bool overlap_;
  bool check_gradients_;
  mutable std::string fault_;  // of a gradient of this rank, since the last step
  bool overlap_gather_;
  std::shared_ptr<int> accumulating_ = std::make_shared<int>(0);  // guards that exist
  std::vector<std::size_t> order_;  // of reductions: the buckets, from the last to the first until learn_order()
  bool learned_order_ = false;
  std::size_t started_ = 0;    // buckets of order_ before this one have been started, or are not needed
  std::int64_t complete_ = 0;  // buckets whose gradients have all arrived
  std::int64_t steps_ = 0;     // calls of step()
  std::vector<Parameter> parameters_;
  std::vector<Bucket> buckets_;                         // in the order of the parameters; empty for a group of one
  std::unique_ptr<Share> share_;                        // AdamW of this rank's part of each parameter; it may be empty
  std::unique_ptr<autograd::EarlyAccumulation> early_;  // with overlap, as hooks_
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
  std::shared_ptr<int> count_;  // null: it does nothing
};

}  // namespace mica::dist

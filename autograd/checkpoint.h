#pragma once

#include <functional>
#include <memory>
#include <tuple>
#include <type_traits>

#include <mica/autograd/function.h>
#include <mica/core/detail/callable.h>

namespace mica::autograd {

namespace detail {

/// The type-erased function and inputs of a checkpoint.
class CheckpointedCall {
 public:
  virtual ~CheckpointedCall() = default;
  virtual Tensors operator()() const = 0;
  /// The tensors among the inputs.
  virtual Tensors inputs() const = 0;
  /// Replaces the inputs by handles that do not follow later in-place writes.
  virtual void snapshot_inputs() = 0;
};

/// Makes the first call. If it would have recorded something, adds a Segment to the graph.
Tensors run_checkpoint(std::unique_ptr<CheckpointedCall> call);

// Overloads for inputs of any type; only tensors matter.
inline void collect(Tensors& tensors, const Tensor& x) { tensors.push_back(x); }
inline void collect(Tensors& tensors, const Tensors& x) { tensors.insert(tensors.end(), x.begin(), x.end()); }
template <class T>
void collect(Tensors&, const T&) {}

inline void replace_by_snapshot(Tensor& x) {
  if (x.defined()) {
    x = snapshot(x);
  }
}
inline void replace_by_snapshot(Tensors& inputs) {
  for (Tensor& x : inputs) {
    replace_by_snapshot(x);
  }
}
template <class T>
void replace_by_snapshot(T&) {}

template <class F, class... In>
class CheckpointedCallOf final : public CheckpointedCall {
 public:
  CheckpointedCallOf(F f, const In&... inputs) : f_(std::move(f)), inputs_(inputs...) {}

  Tensors operator()() const override {
    return std::apply([this](const In&... inputs) { return as_tensors(std::invoke(f_, inputs...)); }, inputs_);
  }
  Tensors inputs() const override {
    Tensors tensors;
    std::apply([&](const In&... inputs) { (collect(tensors, inputs), ...); }, inputs_);
    return tensors;
  }
  void snapshot_inputs() override {
    std::apply([](In&... inputs) { (replace_by_snapshot(inputs), ...); }, inputs_);
  }

 private:
  F f_;
  std::tuple<In...> inputs_;
};

template <class R>
R from_tensors(Tensors tensors) {
  if constexpr (std::is_same_v<R, Tensor>) {
    return std::move(tensors[0]);
  } else if constexpr (std::is_same_v<R, Tensors>) {
    return tensors;
  } else {
    R result;
    std::move(tensors.begin(), tensors.end(), result.begin());
    return result;
  }
}

}  // namespace detail

/// Gradient checkpointing: computes f(inputs…) as one op that saves only f and the inputs. Backward calls f again to
/// recompute its intermediate tensors. Gradients are bit-identical to those of f(inputs…), including those of
/// parameters that f captures, with dropout (the same random numbers are drawn again), in nested checkpoints, with
/// grad() and with create_graph. Hooks of leaves, inputs and results run once; hooks that f registers on its
/// intermediate tensors run in the recomputation.
///
/// f and copies of the inputs are kept until backward has run; f is called as const. It returns a Tensor, an array or a
/// list of them; inputs may be of any type. The second call, on this or another thread, must compute the same: what f
/// captures by reference must still exist, and modules must be in the same mode. backward throws an Error if a tensor
/// from outside was modified in place since, or if the recomputation differs in the number, shapes or dtypes of its
/// outputs or in the number of random tensors it draws. f must return every tensor that is used outside; backward
/// through a leaked one throws. f may write in place to tensors that it created; if it writes to a tensor from outside,
/// checkpoint throws. Results that are views of inputs or of each other cannot be written in place.
///
/// If recording is off, or if nothing that f uses requires a gradient, this just calls f.
///
///     Tensor y = autograd::checkpoint([&](const Tensor& x) { return block(x); }, x);
template <class F, class... In>
requires std::is_invocable_v<const F&, const In&...>
auto checkpoint(F f, const In&... inputs) {
  using Result = std::remove_cvref_t<std::invoke_result_t<const F&, const In&...>>;
  static_assert(detail::TensorResult<Result>, "checkpoint: f must return a Tensor, an array or a list of them");
  check_callable(f, "checkpoint");
  if (!grad_enabled()) {
    return Result(std::invoke(std::as_const(f), inputs...));
  }
  return detail::from_tensors<Result>(
      detail::run_checkpoint(std::make_unique<detail::CheckpointedCallOf<F, In...>>(std::move(f), inputs...)));
}

}  // namespace mica::autograd

#pragma once

#include <functional>
#include <memory>
#include <tuple>
#include <type_traits>

#include <mica/autograd/function.h>

namespace mica::autograd {

namespace detail {

/// What a checkpoint keeps: a function and its inputs, apart from their types.
class CheckpointedCall {
 public:
  virtual ~CheckpointedCall() = default;
  virtual Tensors operator()() const = 0;
  /// The tensors among the inputs.
  virtual Tensors inputs() const = 0;
  /// Lets go of what the inputs become by later writes in place.
  virtual void keep_inputs_as_they_are() = 0;
};

/// Calls it for the first time. If that would have recorded something, makes it a part of the graph.
Tensors run_checkpoint(std::unique_ptr<CheckpointedCall> call);

// For each input, of whatever type.
inline void collect(Tensors& tensors, const Tensor& x) { tensors.push_back(x); }
inline void collect(Tensors& tensors, const Tensors& x) { tensors.insert(tensors.end(), x.begin(), x.end()); }
template <class T>
void collect(Tensors&, const T&) {}

inline void keep_as_it_is(Tensor& x) {
  if (x.defined()) {
    x = as_it_is(x);
  }
}
inline void keep_as_it_is(Tensors& inputs) {
  for (Tensor& x : inputs) {
    keep_as_it_is(x);
  }
}
template <class T>
void keep_as_it_is(T&) {}

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
  void keep_inputs_as_they_are() override {
    std::apply([](In&... inputs) { (keep_as_it_is(inputs), ...); }, inputs_);
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

/// f(inputs…), recorded as one op that saves nothing but f and the inputs: what f computes on the way to its result is
/// computed again when backward comes to it. Gradients are the same bits as those of f(inputs…) itself, also of
/// parameters that f captures, with dropout (the same random numbers are drawn), for nested checkpoints, with grad()
/// and with create_graph. Hooks of leaves, inputs and results run once; those that f registers on tensors it makes run
/// when these are made again.
///
/// f is kept with copies of the inputs until backward has run, and is called as const. It returns a Tensor, an array or
/// a list of them; inputs may be of any type. It must do the same when it is called again, on this or another thread:
/// what it captures by reference must still be there, and modules must be in the same mode. What can be found out of
/// this is checked: tensors from outside that were modified in place since, outputs of another number, shape or dtype
/// and another number of random tensors raise an Error in backward. Tensors that f makes must not leave it other than
/// as results: backward through one raises. f may write in place to what it made, but if it writes to a tensor from
/// outside, checkpoint itself raises. Results that are views of inputs or of one another cannot be written in place.
///
/// While nothing is recorded, or if nothing that f uses requires a gradient, it is just a call.
///
///     Tensor y = autograd::checkpoint([&](const Tensor& x) { return block(x); }, x);
template <class F, class... In>
requires std::is_invocable_v<const F&, const In&...>
auto checkpoint(F f, const In&... inputs) {
  using Result = std::remove_cvref_t<std::invoke_result_t<const F&, const In&...>>;
  static_assert(detail::TensorResult<Result>, "checkpoint: f must return a Tensor, an array or a list of them");
  if (!grad_enabled()) {
    return Result(std::invoke(std::as_const(f), inputs...));
  }
  return detail::from_tensors<Result>(
      detail::run_checkpoint(std::make_unique<detail::CheckpointedCallOf<F, In...>>(std::move(f), inputs...)));
}

}  // namespace mica::autograd

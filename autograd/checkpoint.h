#pragma once

#include <functional>
#include <optional>
#include <tuple>
#include <type_traits>

#include <mica/autograd/function.h>
#include <mica/autograd/segment.h>

namespace mica::autograd {

namespace detail {

/// A checkpoint, apart from the types of its function and inputs.
class CheckpointBase : public Segment {
 public:
  std::string name() const override { return "Checkpoint"; }
  std::vector<std::pair<Edge, Tensor>> replay(const Tensors& gradients) override;
  void release() override;

  /// What was called for the first time: runs it and, if it would have recorded something, becomes part of the graph
  /// and gives its outputs a place in it.
  static Tensors run(const std::shared_ptr<CheckpointBase>& node);

 protected:
  virtual Tensors call() const = 0;
  virtual void note_inputs(std::vector<SegmentWatch::Used>& used) const = 0;
  virtual void drop() = 0;

 private:
  std::vector<SegmentWatch::Used> used_;
  std::vector<PhiloxKey> keys_;
  bool released_ = false;
};

void note_input(std::vector<SegmentWatch::Used>& used, const Tensor& x);
inline void note_input(std::vector<SegmentWatch::Used>& used, const Tensors& inputs) {
  for (const Tensor& x : inputs) {
    note_input(used, x);
  }
}
template <class T>
void note_input(std::vector<SegmentWatch::Used>&, const T&) {}  // not a tensor

template <class F, class... In>
class CheckpointNode final : public CheckpointBase {
 public:
  CheckpointNode(F f, const In&... inputs) : call_(std::in_place, std::move(f), inputs...) {}

 private:
  Tensors call() const override {
    return std::apply([](const F& f, const In&... inputs) { return as_tensors(std::invoke(f, inputs...)); }, *call_);
  }
  void note_inputs(std::vector<SegmentWatch::Used>& used) const override {
    std::apply([&](const F&, const In&... inputs) { (note_input(used, inputs), ...); }, *call_);
  }
  void drop() override { call_.reset(); }

  std::optional<std::tuple<F, In...>> call_;
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
/// and with create_graph. Hooks of leaves and inputs run once.
///
/// f is kept with copies of the inputs until backward has run, and is called as const. It returns a Tensor, an array or
/// a list of them; inputs may be of any type. It must do the same when it is called again, on this or another thread:
/// what it captures by reference must still be there, and modules must be in the same mode. What can be found out of
/// this is checked: tensors from outside that were modified in place since, outputs of another number, shape or dtype
/// and another number of random tensors raise an Error in backward. Tensors that f makes must not leave it other than
/// as results: backward through one raises.
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
      detail::CheckpointBase::run(make_node<detail::CheckpointNode<F, In...>>(std::move(f), inputs...)));
}

}  // namespace mica::autograd

#pragma once

#include <array>
#include <concepts>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include <mica/autograd/grad_mode.h>
#include <mica/autograd/node.h>
#include <mica/autograd/op_observer.h>
#include <mica/autograd/slot.h>
#include <mica/core/tensor.h>

namespace mica::autograd {

/// What a Function keeps between forward and backward.
class Context {
 public:
  /// Keeps tensors for backward: inputs, outputs and intermediates alike; undefined ones stay undefined.
  /// Inputs keep their place in the graph; outputs are kept without making a cycle. To be called once, in forward.
  template <class... T>
  requires(std::same_as<T, Tensor>&&...) void save_for_backward(const T&... tensors) {
    saved_.reserve(sizeof...(tensors));
    (save(tensors), ...);
  }
  void save_for_backward(const Tensors& tensors) {
    for (const Tensor& tensor : tensors) {
      save(tensor);
    }
  }

  /// The saved tensors, in order: `auto [x, mean, rstd] = ctx.saved<3>();`. Throws if one was written in place since,
  /// naming this op and the one that wrote.
  template <std::size_t N>
  std::array<Tensor, N> saved() const {
    check(saved_.size() == N, "{}: backward asks for {} saved tensors, forward saved {}", *name_, N, saved_.size());
    return [this]<std::size_t... I>(std::index_sequence<I...>) { return std::array<Tensor, N>{unpack(I)...}; }
    (std::make_index_sequence<N>());
  }
  /// All saved tensors, where their number is known only at run time.
  Tensors saved_all() const;

  /// True if somebody needs the gradient of tensor input `i`. False for all while nothing is recorded, so that
  /// forward can skip what only backward would use.
  bool needs_grad(std::size_t i) const { return i < needs_grad_.size() && needs_grad_[i]; }
  bool needs_any_grad() const { return needs_any_grad_; }

  /// Says, in forward, that no gradient flows through this output. Integer and boolean outputs need no mention.
  void mark_non_differentiable(const Tensor& output) { non_differentiable_.push_back(output); }

  /// By default, backward gets zeros for an output that had no part in the loss; with false, an undefined tensor.
  void set_materialize_grads(bool on) { materialize_grads_ = on; }

 private:
  // A tensor as it was when it was saved: its record, not a handle to it. A handle would see a history that the tensor
  // gets later by a write in place, and make a cycle with it. The slots in a graph never change their node, so one that
  // holds only slots has no cycles.
  struct Saved {
    mica::detail::TensorImpl record;
    const mica::detail::TensorImpl* of = nullptr;  // only to compare
    std::uint32_t version = 0;
    int output = -1;  // which output of this very node it is: kept without history, given it back by saved()

    Tensor tensor() const {
      return of == nullptr ? Tensor{} : Tensor(std::make_shared<mica::detail::TensorImpl>(record));
    }
  };

  bool is_differentiable(const Tensor& output) const;
  void save(const Tensor& tensor);
  Tensor unpack(std::size_t i) const;

  const std::string* name_ = nullptr;  // of the Function
  std::vector<Saved> saved_;
  std::vector<bool> needs_grad_;
  std::vector<Tensor> non_differentiable_;
  bool needs_any_grad_ = false;
  bool materialize_grads_ = true;
  bool is_traced_ = false;      // DetectAnomaly wants to know of this call
  bool is_in_segment_ = false;  // it is recorded only later
  std::weak_ptr<Node> node_;    // that this context lives in, once there is one

  friend class FunctionBase;
};

// The shapes in which forward may return and backward may return.
namespace detail {

inline Tensors as_tensors(Tensor x) {
  Tensors result;
  result.push_back(std::move(x));
  return result;
}
inline Tensors as_tensors(Tensors x) { return x; }
template <std::size_t N>
Tensors as_tensors(std::array<Tensor, N> x) {
  return Tensors(std::make_move_iterator(x.begin()), std::make_move_iterator(x.end()));
}

/// A type's name without namespaces: "LayerNorm".
std::string short_name(const std::type_info& type);

template <class F>
const std::string& function_name() {
  static const std::string name = short_name(typeid(F));
  return name;
}

template <class T>
concept TensorResult = requires(T x) {
  { as_tensors(std::move(x)) } -> std::same_as<Tensors>;
};

// A Function takes its tensors either one by one or, where their number varies, as one list.
template <class F, class... In>
concept HasForward = requires(F f, Context& ctx, const In&... in) {
  { f.forward(ctx, in...) } -> TensorResult;
};

}  // namespace detail

/// A differentiable operation: `forward(Context&, tensors…)` and `backward(Context&, dy…)`, the attributes its
/// members. forward returns a Tensor, an array or a list of them; nothing inside it is recorded. backward takes one
/// gradient for each output (or a list of them) and returns one for each tensor input, undefined where
/// `ctx.needs_grad(i)` is false. Undefined inputs stand for absent ones and get no gradient.
///
/// If backward computes what it returns by recorded ops alone, from dy and saved tensors, the Function may say so:
/// `static constexpr bool composed = true;`. Then grad() with create_graph can differentiate it again.
template <class F, class... In>
concept Function = std::copyable<F> && detail::HasForward<F, In...>;

/// The part of a recorded Function that does not depend on its type.
class FunctionBase : public Node {
 public:
  explicit FunctionBase(Context&& ctx) : ctx_(std::move(ctx)) {}

  std::string name() const override { return *ctx_.name_; }
  Tensors backward(Tensors gradients) override;
  void release() override;
  Tensors saved_tensors() const override;

  /// Which inputs need a gradient, before forward runs.
  static void prepare(Context& ctx, const std::string& name, const Tensor* const* inputs, std::size_t count);
  /// After forward: ties outputs to the node and the node to the inputs' nodes.
  static void record(const std::shared_ptr<FunctionBase>& node, const Tensor* const* inputs, std::size_t count,
                     const Tensors& outputs);
  /// Whether somebody wants to know of an op that is not recorded, and what tells them.
  static bool is_watched(const Context& ctx) { return ctx.is_traced_ || ctx.is_in_segment_; }
  static void watch(const Context& ctx, const Tensor* const* inputs, std::size_t count, const Tensors& outputs);

 protected:
  virtual Tensors call_backward(Context& ctx, Tensors gradients) = 0;
  /// Whether call_backward is made of recorded ops.
  virtual bool composed() const = 0;

 private:
  Tensors call_opaque_backward(Tensors gradients);

  Context ctx_;
  bool released_ = false;
};

namespace detail {

template <class F>
class FunctionNode final : public FunctionBase {
 public:
  FunctionNode(F&& function, Context&& ctx) : FunctionBase(std::move(ctx)), function_(std::move(function)) {}

 private:
  bool composed() const override {
    if constexpr (requires { F::composed; }) {
      return F::composed;
    } else {
      return false;
    }
  }

  Tensors call_backward(Context& ctx, Tensors gradients) override {
    if constexpr (requires { function_.backward(ctx, static_cast<const Tensors&>(gradients)); }) {
      return as_tensors(function_.backward(ctx, static_cast<const Tensors&>(gradients)));
    } else {
      return unpack(ctx, gradients);
    }
  }

  Tensors unpack(Context& ctx, const Tensors& g) {
    if constexpr (requires { function_.backward(ctx, g[0]); }) {
      return as_tensors(function_.backward(ctx, g.at(0)));
    } else if constexpr (requires { function_.backward(ctx, g[0], g[0]); }) {
      return as_tensors(function_.backward(ctx, g.at(0), g.at(1)));
    } else if constexpr (requires { function_.backward(ctx, g[0], g[0], g[0]); }) {
      return as_tensors(function_.backward(ctx, g.at(0), g.at(1), g.at(2)));
    } else {
      static_assert(
          requires { function_.backward(ctx, g[0], g[0], g[0], g[0]); },
          "backward must take (Context&, const Tensor& dy…), one for each of up to four outputs, or "
          "(Context&, const Tensors&)");
      return as_tensors(function_.backward(ctx, g.at(0), g.at(1), g.at(2), g.at(3)));
    }
  }

  F function_;
};

template <class F, class Call>
auto apply_to(F function, const Tensor* const* inputs, std::size_t count, Call&& call) {
  Context ctx;
  FunctionBase::prepare(ctx, function_name<F>(), inputs, count);
  auto result = [&] {
    const InsideOp guard;
    const ObservedOp observed(function_name<F>());
    return call(function, ctx);
  }();
  if (ctx.needs_any_grad()) {
    const auto node = make_node<FunctionNode<F>>(std::move(function), std::move(ctx));
    FunctionBase::record(node, inputs, count, as_tensors(result));
  } else if (FunctionBase::is_watched(ctx)) [[unlikely]] {
    FunctionBase::watch(ctx, inputs, count, as_tensors(result));
  }
  return result;
}

}  // namespace detail

/// Runs the Function on the tensors and, if gradients are enabled and one of them asks for one, records it.
template <class F, class... In>
requires(std::same_as<In, Tensor>&&...) && Function<F, In...> auto apply(F function, const In&... inputs) {
  const std::array<const Tensor*, sizeof...(In)> pointers{&inputs...};
  return detail::apply_to(std::move(function), pointers.data(), pointers.size(),
                          [&](F& f, Context& ctx) { return f.forward(ctx, inputs...); });
}

template <class F>
requires Function<F, Tensors>
auto apply(F function, const Tensors& inputs) {
  std::vector<const Tensor*> pointers;
  for (const Tensor& input : inputs) {
    pointers.push_back(&input);
  }
  return detail::apply_to(std::move(function), pointers.data(), pointers.size(),
                          [&](F& f, Context& ctx) { return f.forward(ctx, inputs); });
}

}  // namespace mica::autograd

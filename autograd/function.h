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

#include <mica/autograd/detail/module_name.h>
#include <mica/autograd/detail/op_observer.h>
#include <mica/autograd/detail/slot.h>
#include <mica/autograd/grad_mode.h>
#include <mica/autograd/node.h>
#include <mica/core/tensor.h>

namespace mica::autograd {

/// State of a Function between forward and backward.
class Context {
 public:
  Context();
  ~Context();
  Context(Context&&) noexcept;
  Context& operator=(Context&&) = delete;

  /// Saves inputs, outputs or intermediate tensors for backward; undefined tensors stay undefined. Inputs keep their
  /// history; outputs are saved without a reference cycle. Call it once, in forward.
  template <class... T>
  requires(std::same_as<T, Tensor>&&...) void save_for_backward(const T&... tensors) {
    const std::array<const Tensor*, sizeof...(T)> pointers{&tensors...};
    save(pointers.data(), pointers.size());
  }
  void save_for_backward(const Tensors& tensors);

  /// The saved tensors, in order: `auto [x, mean, rstd] = ctx.saved<3>();`. Throws if one was modified in place since;
  /// the error names this op and the one that wrote.
  template <std::size_t N>
  std::array<Tensor, N> saved() const {
    expect_saved(N);
    return [this]<std::size_t... I>(std::index_sequence<I...>) { return std::array<Tensor, N>{unpack(I)...}; }
    (std::make_index_sequence<N>());
  }
  /// All saved tensors, for a number known only at run time.
  Tensors saved_all() const;

  /// True if the gradient of tensor input `i` is needed. False for all inputs while recording is off, so that forward
  /// can skip what only backward uses.
  bool needs_grad(std::size_t i) const { return i < needs_grad_.size() && needs_grad_[i]; }
  bool needs_any_grad() const { return needs_any_grad_; }

  /// Call in forward: no gradient flows through this output. Not needed for integer and boolean outputs.
  void mark_non_differentiable(const Tensor& output);

  /// By default, backward gets zeros for an output that the loss does not depend on; with false, an undefined tensor.
  void set_materialize_grads(bool on) { materialize_grads_ = on; }

 private:
  // A snapshot of a tensor: a copy of its TensorImpl, not a handle. A handle would see the history that a later
  // in-place write gives the tensor, and could form a cycle with it. The slots in a graph never change their node, so
  // references to slots alone cannot form cycles.
  struct Saved {
    mica::detail::TensorImpl record;
    const mica::detail::TensorImpl* of = nullptr;  // the tensor saved; only compared, never dereferenced
    std::uint32_t version = 0;
    int output = -1;  // index, if it is an output of the node: saved without history, which saved() restores

    Tensor tensor() const {
      return of == nullptr ? Tensor{} : Tensor(std::make_shared<mica::detail::TensorImpl>(record));
    }
  };

  bool is_differentiable(const Tensor& output) const;
  void save(const Tensor& tensor);
  void save(const Tensor* const* tensors, std::size_t count);
  void expect_saved(std::size_t count) const;
  Tensor unpack(std::size_t i) const;

  const std::string* name_ = nullptr;  // of the Function
  std::vector<Saved> saved_;
  std::vector<bool> needs_grad_;
  std::vector<Tensor> non_differentiable_;
  bool needs_any_grad_ = false;
  bool materialize_grads_ = true;
  bool is_traced_ = false;      // DetectAnomaly is on
  bool is_in_segment_ = false;  // in a checkpoint: recorded only when backward replays it
  std::weak_ptr<Node> node_;    // the node that owns this context, once created

  friend class FunctionBase;
};

// The return types allowed for forward and backward.
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

template <class F>
const std::string& function_name() {
  static const std::string name = short_name(typeid(F));
  return name;
}

template <class T>
concept TensorResult = requires(T x) {
  { as_tensors(std::move(x)) } -> std::same_as<Tensors>;
};

// A Function takes its tensors one by one or, if their number varies, as one list.
template <class F, class... In>
concept HasForward = requires(F f, Context& ctx, const In&... in) {
  { f.forward(ctx, in...) } -> TensorResult;
};

}  // namespace detail

/// A differentiable op: a struct with `forward(Context&, tensors…)` and `backward(Context&, dy…)`; its attributes are
/// data members. forward returns a Tensor, an array or a list of them; nothing inside it is recorded. backward takes
/// one gradient per output (or a list of them) and returns one per tensor input, undefined where `ctx.needs_grad(i)` is
/// false. An undefined input is an absent one and gets no gradient.
///
/// If backward consists of recorded ops on dy and saved tensors only, declare `static constexpr bool composed = true;`.
/// grad() with create_graph can then differentiate it again.
template <class F, class... In>
concept Function = std::copyable<F> && detail::HasForward<F, In...>;

/// The type-independent part of a recorded Function.
class FunctionBase : public Node {
 public:
  explicit FunctionBase(Context&& ctx);
  ~FunctionBase() override;

  std::string name() const override { return *ctx_.name_; }
  Tensors backward(Tensors gradients) override;
  void release() override;
  Tensors saved_tensors() const override;

  /// One call of a Function, type-erased, so that the common code is compiled once.
  struct Call {
    void* self;
    void (*forward)(void* self, Context& ctx);
    Tensors (*outputs)(void* self);                        // of forward
    FunctionBase* (*new_node)(void* self, Context&& ctx);  // a FunctionNode, which takes over the Function
  };
  /// Runs forward, and records the op or notifies observers.
  static void run(const Call& call, const std::string& name, const Tensor* const* inputs, std::size_t count);

 protected:
  virtual Tensors call_backward(Context& ctx, Tensors gradients) = 0;
  /// Whether call_backward consists of recorded ops.
  virtual bool composed() const = 0;
  /// A backward may ignore the last outputs, but must not take more gradients than there are outputs.
  void expect_outputs(std::size_t asked, const Tensors& gradients) const;

 private:
  // Before forward: determines which inputs need a gradient.
  static void prepare(Context& ctx, const std::string& name, const Tensor* const* inputs, std::size_t count);
  // After forward: connects the outputs to the node, and the node to the nodes of the inputs.
  static void record(const std::shared_ptr<FunctionBase>& node, const Tensor* const* inputs, std::size_t count,
                     const Tensors& outputs);
  // For ops that are not recorded: notifies DetectAnomaly or a checkpoint.
  static void watch(const Context& ctx, const Tensor* const* inputs, std::size_t count, const Tensors& outputs);

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

  Tensors call_backward(Context& ctx, Tensors g) override {
    if constexpr (requires { function_.backward(ctx, static_cast<const Tensors&>(g)); }) {
      return as_tensors(function_.backward(ctx, static_cast<const Tensors&>(g)));
    } else if constexpr (requires { function_.backward(ctx, g[0]); }) {
      expect_outputs(1, g);
      return as_tensors(function_.backward(ctx, g[0]));
    } else if constexpr (requires { function_.backward(ctx, g[0], g[0]); }) {
      expect_outputs(2, g);
      return as_tensors(function_.backward(ctx, g[0], g[1]));
    } else if constexpr (requires { function_.backward(ctx, g[0], g[0], g[0]); }) {
      expect_outputs(3, g);
      return as_tensors(function_.backward(ctx, g[0], g[1], g[2]));
    } else {
      static_assert(
          requires { function_.backward(ctx, g[0], g[0], g[0], g[0]); },
          "backward must take (Context&, const Tensor& dy…), one for each of up to four outputs, or "
          "(Context&, const Tensors&)");
      expect_outputs(4, g);
      return as_tensors(function_.backward(ctx, g[0], g[1], g[2], g[3]));
    }
  }

  F function_;
};

template <class F, class Forward>
auto apply_to(F function, const Tensor* const* inputs, std::size_t count, Forward forward) {
  using Result = decltype(forward(function, std::declval<Context&>()));
  struct State {
    F function;
    Forward forward;
    Result result{};
  } state{std::move(function), std::move(forward)};
  FunctionBase::run({.self = &state,
                     .forward =
                         [](void* self, Context& ctx) {
                           State& s = *static_cast<State*>(self);
                           s.result = s.forward(s.function, ctx);
                         },
                     .outputs = [](void* self) { return as_tensors(static_cast<State*>(self)->result); },
                     .new_node = [](void* self, Context&& ctx) -> FunctionBase* {
                       return new FunctionNode<F>(std::move(static_cast<State*>(self)->function), std::move(ctx));
                     }},
                    function_name<F>(), inputs, count);
  return std::move(state.result);
}

}  // namespace detail

/// Runs the Function on the tensors. Records it if gradients are enabled and an input requires one.
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

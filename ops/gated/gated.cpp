#include <vector>

#include <mica/autograd/function.h>
#include <mica/core/creation.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/detail/unary_gradient.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/gated/detail/gated_kernels.h>
#include <mica/ops/gated/gated.h>
#include <mica/ops/join/join.h>
#include <mica/ops/view/view.h>

namespace mica {

namespace {

Tensor value(functions::Silu, const Tensor& x) { return silu(x); }
Tensor value(functions::Gelu, const Tensor& x) { return gelu(x); }
Tensor value(functions::GeluTanh, const Tensor& x) { return gelu(x, GeluApproximation::tanh); }

// The inputs of a gated op: gate and up, or a single x = [gate | up] along its last axis.
struct Halves {
  Tensor gate;
  Tensor up;
};

Tensor half(const Tensor& x, int which) {
  const std::int64_t n = x.size(-1) / 2;
  return slice(x, -1, which * n, (which + 1) * n);
}
Halves halves_of(const Tensor& x) { return {.gate = half(x, 0), .up = half(x, 1)}; }

Halves gate_and_up(const Tensors& inputs) {
  return inputs.size() == 1 ? halves_of(inputs[0]) : Halves{.gate = inputs[0], .up = inputs[1]};
}

// Computes the required gradients of the op's inputs from dy and these inputs.
template <class F>
struct GatedGradient {
  static constexpr bool composed = true;
  std::vector<bool> wanted;

  Tensors forward(autograd::Context& ctx, const Tensors& all) const {
    ctx.set_materialize_grads(false);
    ctx.save_for_backward(all);
    const Tensors inputs(all.begin() + 1, all.end());
    Tensors gradients;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      gradients.push_back(wanted[i] ? empty(inputs[i].shape(), inputs[i].dtype(), inputs[i].device()) : Tensor{});
    }
    if (inputs[0].numel() > 0) {
      const Halves x = gate_and_up(inputs), dx = gate_and_up(gradients);
      on_device(all[0].device(),
                [&](auto device) { kernels::gated_backward(device, F{}, dx.gate, dx.up, all[0], x.gate, x.up); });
    }
    return gradients;
  }

  // `incoming` are the gradients of dgate and dup, undefined if there are none. README.md has the derivation.
  Tensors backward(autograd::Context& ctx, const Tensors& incoming) const {
    const Tensors all = ctx.saved_all();
    const bool joined = all.size() == 2;
    const DType sums = accumulate_dtype(all[0].dtype());  // so that only the last step rounds to 16 bits
    const auto exact = [&](const Tensor& t) { return t.defined() ? t.to(sums) : t; };
    const auto both = [&](const Tensors& t) {
      return joined ? halves_of(exact(t[0])) : Halves{exact(t[0]), exact(t[1])};
    };
    const Tensor dy = exact(all[0]);
    const auto [gate, up] = both({all.begin() + 1, all.end()});
    const auto [a, b] = both(incoming);
    const auto sum = [](const Tensor& s, const Tensor& t) { return !s.defined() ? t : !t.defined() ? s : s + t; };
    const auto times_slope = [&, &gate = gate](const Tensor& t) {
      return t.defined() ? detail::unary_gradient(F{}, t, gate) : t;
    };
    const Tensor a_up = a.defined() ? a * up : a;
    const Tensor bent = a.defined() ? detail::unary_curvature(F{}, a_up, gate) : a;
    const Tensor dgate = sum(bent, times_slope(b)) * dy;
    const Tensor dup = a.defined() ? times_slope(a * dy) : zeros_like(gate);
    const Tensor ddy = sum(times_slope(a_up), b.defined() ? b * value(F{}, gate) : b);
    Tensors gradients{ddy, dgate, dup};
    if (joined) {
      gradients = {ddy, cat({dgate, dup}, -1)};
    }
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      gradients[i] = ctx.needs_grad(i) ? gradients[i].to(all[i].dtype()) : Tensor{};
    }
    return gradients;
  }
};

template <class F>
struct Gated {
  static constexpr bool composed = true;

  Tensor forward(autograd::Context& ctx, const Tensors& inputs) const {
    ctx.save_for_backward(inputs);
    Shape shape = inputs[0].shape();
    if (inputs.size() == 1) {
      shape[shape.size() - 1] /= 2;
    }
    const Tensor y = empty(shape, inputs[0].dtype(), inputs[0].device());
    if (y.numel() > 0) {
      const Halves x = gate_and_up(inputs);
      on_device(y.device(), [&](auto device) { kernels::gated_forward(device, F{}, y, x.gate, x.up); });
    }
    return y;
  }

  Tensors backward(autograd::Context& ctx, const Tensor& dy) const {
    Tensors all = ctx.saved_all();
    std::vector<bool> wanted;
    for (std::size_t i = 0; i < all.size(); ++i) {
      wanted.push_back(ctx.needs_grad(i));
    }
    all.insert(all.begin(), dy);
    return autograd::apply(GatedGradient<F>{wanted}, all);
  }
};

// One type per op, so that errors name it.
struct GEGLU : Gated<functions::Gelu> {};
struct GEGLUTanh : Gated<functions::GeluTanh> {};
struct SwiGLU : Gated<functions::Silu> {};

void check_input(const char* op, const char* name, const Tensor& x) {
  check(x.defined(), "{}: expected a defined {}, got an undefined one", op, name);
  check(is_floating(x.dtype()), "{}: expected {} of a floating dtype, got {}", op, name, x.dtype());
}

template <class Op>
Tensor gated(const char* op, const Tensor& gate, const Tensor& up) {
  check_input(op, "gate", gate);
  check_input(op, "up", up);
  check(up.shape() == gate.shape() && up.dtype() == gate.dtype() && up.device() == gate.device(),
        "{}: expected up like gate, {} {} on {}, got {} {} on {}", op, gate.dtype(), gate.shape(), gate.device(),
        up.dtype(), up.shape(), up.device());
  return autograd::apply(Op{}, Tensors{gate, up});
}

template <class Op>
Tensor gated(const char* op, const Tensor& x) {
  check_input(op, "x", x);
  check(x.dim() > 0 && x.size(-1) % 2 == 0, "{}: expected x with a last axis of even length, got shape {}", op,
        x.shape());
  return autograd::apply(Op{}, Tensors{x});
}

}  // namespace

Tensor geglu(const Tensor& gate, const Tensor& up, GeluApproximation approximation) {
  return approximation == GeluApproximation::tanh ? gated<GEGLUTanh>("geglu", gate, up)
                                                  : gated<GEGLU>("geglu", gate, up);
}
Tensor geglu(const Tensor& x, GeluApproximation approximation) {
  return approximation == GeluApproximation::tanh ? gated<GEGLUTanh>("geglu", x) : gated<GEGLU>("geglu", x);
}
Tensor swiglu(const Tensor& gate, const Tensor& up) { return gated<SwiGLU>("swiglu", gate, up); }
Tensor swiglu(const Tensor& x) { return gated<SwiGLU>("swiglu", x); }

}  // namespace mica

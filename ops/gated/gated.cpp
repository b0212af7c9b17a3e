#include <vector>

#include <mica/autograd/function.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/gated/detail/gated_kernels.h>
#include <mica/ops/gated/gated.h>
#include <mica/ops/join/join.h>
#include <mica/ops/view/view.h>

namespace mica {

namespace {

using functions::gated::Gelu;
using functions::gated::GeluTanh;
using functions::gated::Silu;

// f, f′ and f″ by recorded ops, for second derivatives.
struct Curve {
  Tensor value;
  Tensor slope;
  Tensor curvature;
};

Curve curve(Silu, const Tensor& x) {
  const Tensor s = sigmoid(x);
  const Tensor rest = 1 - s;
  return {.value = x * s, .slope = s * (x * rest + 1), .curvature = s * rest * (x * (1 - s * 2) + 2)};
}
Curve curve(Gelu, const Tensor& x) {
  const Tensor square = x * x;
  const Tensor cdf = erf(x * 0.70710678118654752) * 0.5 + 0.5;
  const Tensor density = exp(square * -0.5) * 0.39894228040143268;  // 1 / √(2π)
  return {.value = x * cdf, .slope = cdf + x * density, .curvature = density * (2 - square)};
}
// z = a x + b x³
Curve curve(GeluTanh, const Tensor& x) {
  constexpr double a = GeluTanh::a;
  constexpr double b = GeluTanh::b;
  const Tensor square = x * x;
  const Tensor s = sigmoid(x * (square * b + a));
  const Tensor steep = s * (1 - s);        // ds/dz
  const Tensor z1 = square * (3 * b) + a;  // z′
  return {.value = x * s,
          .slope = s + steep * (x * z1),
          .curvature = steep * (z1 * 2 + x * ((1 - s * 2) * (z1 * z1) + x * (6 * b)))};
}

// A gated op has the inputs gate and up, or x with both side by side along its last axis.
struct Halves {
  Tensor gate;
  Tensor up;
};

Tensor half(const Tensor& x, int which) {
  const std::int64_t n = x.size(-1) / 2;
  return slice(x, -1, which * n, (which + 1) * n);
}
Halves halves_of(const Tensor& x) { return {.gate = half(x, 0), .up = half(x, 1)}; }

// The inputs for the kernels: contiguous, or halves of a contiguous tensor.
struct GatedRows {
  std::int64_t rows;
  std::int64_t columns;
  std::int64_t stride;
  Halves data;

  explicit GatedRows(const Tensors& inputs)
      : rows(1), columns(inputs[0].numel()), stride(columns), data{inputs[0], inputs.back()} {
    if (inputs.size() == 1) {
      stride = inputs[0].size(-1);
      rows = columns / stride;
      columns = stride / 2;
      data = halves_of(contiguous_data(inputs[0]));
    } else {
      data = {.gate = contiguous_data(data.gate), .up = contiguous_data(data.up)};
    }
  }
};

// From dy and the op's inputs to the required gradients of these inputs.
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
      const GatedRows rows(inputs);
      const Tensor dy = contiguous_data(all[0]);
      const Halves out = inputs.size() == 1 ? halves_of(gradients[0]) : Halves{gradients[0], gradients[1]};
      const kernels::GatedBackward args{.function = F{},
                                        .rows = rows.rows,
                                        .columns = rows.columns,
                                        .stride = rows.stride,
                                        .dy = dy,
                                        .gate = rows.data.gate,
                                        .up = rows.data.up,
                                        .dgate = out.gate,
                                        .dup = out.up};
      on_device(dy.device(), [&](auto device) { kernels::gated_backward(device, args); });
    }
    return gradients;
  }

  // Takes the gradients of dgate and dup, undefined if there are none. See the derivation in README.md.
  Tensors backward(autograd::Context& ctx, const Tensors& came) const {
    const Tensors all = ctx.saved_all();
    const bool joined = all.size() == 2;
    const DType sums = accumulate_dtype(all[0].dtype());  // only the last step rounds
    const auto exact = [&](const Tensor& t) { return t.defined() ? t.to(sums) : t; };
    const auto both = [&](const Tensors& t) {
      return joined ? halves_of(exact(t[0])) : Halves{exact(t[0]), exact(t[1])};
    };
    const Tensor dy = exact(all[0]);
    const auto [gate, up] = both({all.begin() + 1, all.end()});
    const auto [a, b] = both(came);
    const Curve f = curve(F{}, gate);
    const auto sum = [](const Tensor& s, const Tensor& t) { return !s.defined() ? t : !t.defined() ? s : s + t; };
    const auto times = [](const Tensor& s, const Tensor& t) { return s.defined() ? s * t : s; };

    const Tensor a_up = times(a, up);
    const Tensor dgate = times(sum(times(a_up, f.curvature), times(b, f.slope)), dy);
    const Tensor dup = a.defined() ? a * dy * f.slope : zeros_like(gate);
    const Tensor ddy = sum(times(a_up, f.slope), times(b, f.value));
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
      const GatedRows rows(inputs);
      const kernels::GatedForward args{.function = F{},
                                       .rows = rows.rows,
                                       .columns = rows.columns,
                                       .stride = rows.stride,
                                       .gate = rows.data.gate,
                                       .up = rows.data.up,
                                       .y = y};
      on_device(y.device(), [&](auto device) { kernels::gated_forward(device, args); });
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
struct GEGLU : Gated<Gelu> {};
struct GEGLUTanh : Gated<GeluTanh> {};
struct SwiGLU : Gated<Silu> {};

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

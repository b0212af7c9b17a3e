#include <limits>

#include <mica/autograd/function.h>
#include <mica/core/creation.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/elementwise/detail/elementwise_kernels.h>
#include <mica/ops/elementwise/detail/operands.h>
#include <mica/ops/elementwise/detail/unary_gradient.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/elementwise/where.h>

namespace mica {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// times_curvature(f, t, v) is t · d(f.derivative(v))/dv, for second derivatives, by recorded ops. Where one factor
// grows as the other vanishes, x is clamped to where their product is not negligible, so that it is never 0 · ∞.

Tensor times_curvature(functions::Exp, const Tensor& t, const Tensor&) { return t; }
Tensor times_curvature(functions::Log, const Tensor& t, const Tensor& x) { return neg(t / x / x); }
Tensor times_curvature(functions::Log1p, const Tensor& t, const Tensor& x) {
  const Tensor z = x + 1;
  return neg(t / z / z);
}
Tensor times_curvature(functions::Expm1, const Tensor& t, const Tensor&) { return t; }
Tensor times_curvature(functions::Sin, const Tensor& t, const Tensor& x) { return neg(t * sin(x)); }
Tensor times_curvature(functions::Cos, const Tensor& t, const Tensor& x) { return neg(t * cos(x)); }
Tensor times_curvature(functions::Sqrt, const Tensor& t, const Tensor& y) { return t * -0.5 / (y * y); }
Tensor times_curvature(functions::Rsqrt, const Tensor& t, const Tensor& y) { return t * (y * y * -1.5); }
Tensor times_curvature(functions::Square, const Tensor& t, const Tensor&) { return t * 2; }
Tensor times_curvature(functions::PowScalar f, const Tensor& t, const Tensor& x) {
  const double factor = f.exponent * (f.exponent - 1);
  return factor == 0 ? zeros_like(x) : t * (pow(x, f.exponent - 2) * factor);
}
Tensor times_curvature(functions::Tanh, const Tensor& t, const Tensor& y) { return t * (y * -2); }
Tensor times_curvature(functions::Erf, const Tensor& t, const Tensor& any) {
  const Tensor x = clamp(any, -40, 40);
  return t * (x * exp(neg(x * x)) * -2.2567583341910251);  // −4 / √π
}
Tensor times_curvature(functions::Sigmoid, const Tensor& t, const Tensor& y) { return t * (1 - y * 2); }
Tensor times_curvature(functions::Softplus f, const Tensor& t, const Tensor& x) {
  const Tensor scaled = x * f.beta;
  const Tensor s = sigmoid(scaled);
  return where(gt(scaled, f.threshold), 0, t * (s * (1 - s)) * f.beta);
}
Tensor times_curvature(functions::Elu f, const Tensor& t, const Tensor& x) {
  return where(gt(x, 0), 0, t * exp(clamp(x, -kInfinity, 0)) * f.alpha);
}
Tensor times_curvature(functions::Silu, const Tensor& t, const Tensor& any) {
  const Tensor x = clamp(any, -800, 800);
  const Tensor s = sigmoid(x);
  return t * (s * (1 - s) * (x * (1 - s * 2) + 2));
}
Tensor times_curvature(functions::Gelu, const Tensor& t, const Tensor& any) {
  const Tensor x = clamp(any, -40, 40);
  const Tensor square = x * x;
  return t * (exp(square * -0.5) * (2 - square) * 0.39894228040143268);  // 1 / √(2π)
}
// x · sigmoid(z), z = a x + b x³: the derivative is s + x s (1 − s) z′.
Tensor times_curvature(functions::GeluTanh f, const Tensor& t, const Tensor& any) {
  const Tensor x = clamp(any, -25, 25);
  const Tensor square = x * x;
  const Tensor s = sigmoid(x * (square * f.b + f.a));
  const Tensor slope = square * (3 * f.b) + f.a;
  const Tensor ds = s * (1 - s);
  return t * (ds * slope * (x * slope * (1 - s * 2) + 2) + ds * square * (6 * f.b));
}
Tensor times_curvature(functions::Relu, const Tensor&, const Tensor& y) { return zeros_like(y); }
Tensor times_curvature(functions::LeakyRelu, const Tensor&, const Tensor& x) { return zeros_like(x); }
Tensor times_curvature(functions::Abs, const Tensor&, const Tensor& x) { return zeros_like(x); }
Tensor times_curvature(functions::Clamp, const Tensor&, const Tensor& x) { return zeros_like(x); }
Tensor times_curvature(functions::Stepwise, const Tensor&, const Tensor& x) { return zeros_like(x); }

// dx = dy · derivative(v).
template <class F>
struct UnaryGradient {
  static constexpr bool composed = true;
  F f{};

  Tensor forward(autograd::Context& ctx, const Tensor& dy, const Tensor& v) const {
    const Tensor dx = detail::new_result(dy.shape(), dy.dtype(), dy, v);
    on_device(dy.device(), [&](auto device) { kernels::unary_backward(device, f, dx, dy, v); });
    ctx.save_for_backward(dy, v);
    return dx;
  }

  Tensors backward(autograd::Context& ctx, const Tensor& ddx) const {
    const auto [dy, v] = ctx.saved<2>();
    return {ctx.needs_grad(0) ? autograd::apply(UnaryGradient{f}, ddx, v) : Tensor{},
            ctx.needs_grad(1) ? times_curvature(f, ddx * dy, v) : Tensor{}};
  }
};

template <class F>
struct Unary {
  static constexpr bool composed = true;
  F f{};

  Tensor forward(autograd::Context& ctx, const Tensor& x) const {
    check(is_floating(x.dtype()), "{}: expected a floating dtype, got {}", F::name, x.dtype());
    const Tensor y = detail::new_result(x.shape(), x.dtype(), x);
    on_device(x.device(), [&](auto device) { kernels::unary(device, f, y, x); });
    ctx.save_for_backward(F::from_output ? y : x);
    return y;
  }

  Tensor backward(autograd::Context& ctx, const Tensor& dy) const {
    const auto [v] = ctx.saved<1>();
    return autograd::apply(UnaryGradient<F>{f}, dy, v);
  }
};

// One type per op, so that errors name it.
struct Exp : Unary<functions::Exp> {};
struct Log : Unary<functions::Log> {};
struct Log1p : Unary<functions::Log1p> {};
struct Expm1 : Unary<functions::Expm1> {};
struct Sin : Unary<functions::Sin> {};
struct Cos : Unary<functions::Cos> {};
struct Sqrt : Unary<functions::Sqrt> {};
struct Rsqrt : Unary<functions::Rsqrt> {};
struct Square : Unary<functions::Square> {};
struct Tanh : Unary<functions::Tanh> {};
struct Erf : Unary<functions::Erf> {};
struct Sigmoid : Unary<functions::Sigmoid> {};
struct Relu : Unary<functions::Relu> {};
struct LeakyRelu : Unary<functions::LeakyRelu> {};
struct Softplus : Unary<functions::Softplus> {};
struct Elu : Unary<functions::Elu> {};
struct Silu : Unary<functions::Silu> {};
struct Abs : Unary<functions::Abs> {};
struct Clamp : Unary<functions::Clamp> {};
struct Floor : Unary<functions::Floor> {};
struct Ceil : Unary<functions::Ceil> {};
struct Round : Unary<functions::Round> {};
struct Gelu : Unary<functions::Gelu> {};
struct GeluTanh : Unary<functions::GeluTanh> {};
namespace with_number {  // binary.cpp has another Pow
struct Pow : Unary<functions::PowScalar> {};
}  // namespace with_number

struct Neg {
  static constexpr bool composed = true;

  Tensor forward(autograd::Context&, const Tensor& x) const {
    check(x.dtype() != uint8 && x.dtype() != boolean, "neg: expected a signed dtype, got {}", x.dtype());
    const Tensor y = detail::new_result(x.shape(), x.dtype(), x);
    on_device(x.device(), [&](auto device) { kernels::binary(device, functions::Mul{}, y, x, -1.0); });
    return y;
  }
  Tensor backward(autograd::Context&, const Tensor& dy) const { return neg(dy); }
};

}  // namespace

Tensor detail::unary_gradient(const kernels::UnaryFunction& function, const Tensor& dy, const Tensor& v) {
  return std::visit([&]<class F>(const F& f) { return autograd::apply(UnaryGradient<F>{f}, dy, v); }, function);
}

Tensor detail::unary_curvature(const kernels::UnaryFunction& function, const Tensor& t, const Tensor& v) {
  return std::visit([&](const auto& f) { return times_curvature(f, t, v); }, function);
}

Tensor neg(const Tensor& x) { return autograd::apply(Neg{}, x); }
Tensor exp(const Tensor& x) { return autograd::apply(Exp{}, x); }
Tensor log(const Tensor& x) { return autograd::apply(Log{}, x); }
Tensor log1p(const Tensor& x) { return autograd::apply(Log1p{}, x); }
Tensor expm1(const Tensor& x) { return autograd::apply(Expm1{}, x); }
Tensor sin(const Tensor& x) { return autograd::apply(Sin{}, x); }
Tensor cos(const Tensor& x) { return autograd::apply(Cos{}, x); }
Tensor sqrt(const Tensor& x) { return autograd::apply(Sqrt{}, x); }
Tensor rsqrt(const Tensor& x) { return autograd::apply(Rsqrt{}, x); }
Tensor pow(const Tensor& x, double exponent) {
  if (exponent == 2) {
    return autograd::apply(Square{}, x);
  }
  return autograd::apply(with_number::Pow{{.f = {.exponent = exponent}}}, x);
}
Tensor tanh(const Tensor& x) { return autograd::apply(Tanh{}, x); }
Tensor erf(const Tensor& x) { return autograd::apply(Erf{}, x); }
Tensor sigmoid(const Tensor& x) { return autograd::apply(Sigmoid{}, x); }
Tensor relu(const Tensor& x) { return autograd::apply(Relu{}, x); }
Tensor leaky_relu(const Tensor& x, double slope) { return autograd::apply(LeakyRelu{{.f = {.slope = slope}}}, x); }
Tensor elu(const Tensor& x, double alpha) { return autograd::apply(Elu{{.f = {.alpha = alpha}}}, x); }
Tensor softplus(const Tensor& x, double beta, double threshold) {
  check(beta != 0, "softplus: expected beta != 0");
  return autograd::apply(Softplus{{.f = {.beta = beta, .threshold = threshold}}}, x);
}
Tensor silu(const Tensor& x) { return autograd::apply(Silu{}, x); }
Tensor abs(const Tensor& x) { return autograd::apply(Abs{}, x); }
Tensor clamp(const Tensor& x, double low, double high) {
  check(low <= high, "clamp: expected low <= high, got {} and {}", low, high);
  return autograd::apply(Clamp{{.f = {.low = low, .high = high}}}, x);
}
Tensor floor(const Tensor& x) { return autograd::apply(Floor{}, x); }
Tensor ceil(const Tensor& x) { return autograd::apply(Ceil{}, x); }
Tensor round(const Tensor& x) { return autograd::apply(Round{}, x); }
Tensor gelu(const Tensor& x, GeluApproximation approximation) {
  check(approximation <= GeluApproximation::tanh, "gelu: expected the approximation none or tanh, got {}",
        static_cast<int>(approximation));
  return approximation == GeluApproximation::tanh ? autograd::apply(GeluTanh{}, x) : autograd::apply(Gelu{}, x);
}

}  // namespace mica

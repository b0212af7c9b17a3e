#include <mica/autograd/function.h>
#include <mica/core/creation.h>
#include <mica/ops/elementwise/elementwise_kernels.h>
#include <mica/ops/elementwise/unary.h>

namespace mica {

namespace {

template <class F>
struct Unary {
  F f{};

  Tensor forward(autograd::Context& ctx, const Tensor& x) const {
    check(is_floating(x.dtype()), "{}: expected a floating dtype, got {}", F::name, x.dtype());
    const Tensor y = empty_like(x);
    on_device(x.device(), [&](auto device) { kernels::unary(device, f, y, x); });
    ctx.save_for_backward(F::from_output ? y : x);
    return y;
  }

  Tensor backward(autograd::Context& ctx, const Tensor& dy) const {
    const auto [saved] = ctx.saved<1>();
    const Tensor dx = empty_like(dy);
    const Tensor& v = saved;
    on_device(dy.device(), [&](auto device) { kernels::unary_backward(device, f, dx, dy, v); });
    return dx;
  }
};

// One type an op, so that errors name it.
struct Exp : Unary<functions::Exp> {};
struct Log : Unary<functions::Log> {};
struct Sqrt : Unary<functions::Sqrt> {};
struct Rsqrt : Unary<functions::Rsqrt> {};
struct Square : Unary<functions::Square> {};
struct Pow : Unary<functions::PowScalar> {};
struct Tanh : Unary<functions::Tanh> {};
struct Erf : Unary<functions::Erf> {};
struct Sigmoid : Unary<functions::Sigmoid> {};
struct Relu : Unary<functions::Relu> {};
struct Silu : Unary<functions::Silu> {};
struct Abs : Unary<functions::Abs> {};
struct Clamp : Unary<functions::Clamp> {};
struct Gelu : Unary<functions::Gelu> {};
struct GeluTanh : Unary<functions::GeluTanh> {};

struct Neg {
  static constexpr bool composed = true;

  Tensor forward(autograd::Context&, const Tensor& x) const {
    check(x.dtype() != uint8 && x.dtype() != boolean, "neg: expected a signed dtype, got {}", x.dtype());
    const Tensor y = empty_like(x);
    on_device(x.device(), [&](auto device) { kernels::binary(device, functions::Mul{}, y, x, -1.0); });
    return y;
  }
  Tensor backward(autograd::Context&, const Tensor& dy) const { return neg(dy); }
};

}  // namespace

Tensor neg(const Tensor& x) { return autograd::apply(Neg{}, x); }
Tensor exp(const Tensor& x) { return autograd::apply(Exp{}, x); }
Tensor log(const Tensor& x) { return autograd::apply(Log{}, x); }
Tensor sqrt(const Tensor& x) { return autograd::apply(Sqrt{}, x); }
Tensor rsqrt(const Tensor& x) { return autograd::apply(Rsqrt{}, x); }
Tensor pow(const Tensor& x, double exponent) {
  if (exponent == 2) {
    return autograd::apply(Square{}, x);
  }
  return autograd::apply(Pow{{.f = {.exponent = exponent}}}, x);
}
Tensor tanh(const Tensor& x) { return autograd::apply(Tanh{}, x); }
Tensor erf(const Tensor& x) { return autograd::apply(Erf{}, x); }
Tensor sigmoid(const Tensor& x) { return autograd::apply(Sigmoid{}, x); }
Tensor relu(const Tensor& x) { return autograd::apply(Relu{}, x); }
Tensor silu(const Tensor& x) { return autograd::apply(Silu{}, x); }
Tensor abs(const Tensor& x) { return autograd::apply(Abs{}, x); }
Tensor clamp(const Tensor& x, double low, double high) {
  check(low <= high, "clamp: expected low <= high, got {} and {}", low, high);
  return autograd::apply(Clamp{{.f = {.low = low, .high = high}}}, x);
}
Tensor gelu(const Tensor& x, GeluApproximation approximation) {
  return approximation == GeluApproximation::tanh ? autograd::apply(GeluTanh{}, x) : autograd::apply(Gelu{}, x);
}

}  // namespace mica

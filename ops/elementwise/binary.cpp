#include <type_traits>

#include <mica/autograd/autocast.h>
#include <mica/autograd/function.h>
#include <mica/core/creation.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/elementwise/detail/elementwise_kernels.h>
#include <mica/ops/elementwise/detail/operands.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/elementwise/where.h>

namespace mica {

namespace {

using autograd::Context;

template <class F>
Tensor compute(F f, const Tensor& a, const Tensor& b) {
  const Tensor out = detail::new_result(detail::common_shape(a, b, F::name), a.dtype(), a, b);
  on_device(out.device(), [&](auto device) { kernels::binary(device, f, out, a, b); });
  return out;
}

template <class F>
Tensor compute(F f, const Tensor& a, double b) {
  detail::check_number(b, a.dtype(), F::name);
  const Tensor out = detail::new_result(a.shape(), a.dtype(), a);
  on_device(out.device(), [&](auto device) { kernels::binary(device, f, out, a, b); });
  return out;
}

template <class F>
Tensor compute(F f, double a, const Tensor& b) {
  detail::check_number(a, b.dtype(), F::name);
  const Tensor out = detail::new_result(b.shape(), b.dtype(), b);
  on_device(out.device(), [&](auto device) { kernels::binary(device, f, out, a, b); });
  return out;
}

// The shapes of a and b, to which gradients are reduced.
struct OperandShapes {
  Shape a, b;

  void remember(const Context& ctx, const Tensor& x, const Tensor& y) {
    if (ctx.needs_any_grad()) {
      a = x.shape();
      b = y.shape();
    }
  }
};

struct Add {
  static constexpr bool composed = true;
  OperandShapes shapes{};

  Tensor forward(Context& ctx, const Tensor& a, const Tensor& b) {
    shapes.remember(ctx, a, b);
    return compute(functions::Add{}, a, b);
  }
  Tensors backward(Context& ctx, const Tensor& dy) const {
    return {ctx.needs_grad(0) ? detail::unbroadcast(dy, shapes.a) : Tensor{},
            ctx.needs_grad(1) ? detail::unbroadcast(dy, shapes.b) : Tensor{}};
  }
};

struct AddNumber {
  static constexpr bool composed = true;
  double b;

  Tensor forward(Context&, const Tensor& a) const { return compute(functions::Add{}, a, b); }
  Tensor backward(Context&, const Tensor& dy) const { return dy; }
};

struct Sub {
  static constexpr bool composed = true;
  OperandShapes shapes{};

  Tensor forward(Context& ctx, const Tensor& a, const Tensor& b) {
    shapes.remember(ctx, a, b);
    return compute(functions::Sub{}, a, b);
  }
  Tensors backward(Context& ctx, const Tensor& dy) const {
    return {ctx.needs_grad(0) ? detail::unbroadcast(dy, shapes.a) : Tensor{},
            ctx.needs_grad(1) ? neg(detail::unbroadcast(dy, shapes.b)) : Tensor{}};
  }
};

struct SubNumber {
  static constexpr bool composed = true;
  double b;

  Tensor forward(Context&, const Tensor& a) const { return compute(functions::Sub{}, a, b); }
  Tensor backward(Context&, const Tensor& dy) const { return dy; }
};

struct SubFromNumber {
  static constexpr bool composed = true;
  double a;

  Tensor forward(Context&, const Tensor& b) const { return compute(functions::Sub{}, a, b); }
  Tensor backward(Context&, const Tensor& dy) const { return neg(dy); }
};

struct Mul {
  static constexpr bool composed = true;
  OperandShapes shapes{};

  Tensor forward(Context& ctx, const Tensor& a, const Tensor& b) {
    shapes.remember(ctx, a, b);
    // Each input is needed only for the other's gradient. Not saving it otherwise permits writing it in place.
    ctx.save_for_backward(ctx.needs_grad(1) ? a : Tensor{}, ctx.needs_grad(0) ? b : Tensor{});
    return compute(functions::Mul{}, a, b);
  }
  Tensors backward(Context& ctx, const Tensor& dy) const {
    const auto [a, b] = ctx.saved<2>();
    return {ctx.needs_grad(0) ? detail::unbroadcast(dy * b, shapes.a) : Tensor{},
            ctx.needs_grad(1) ? detail::unbroadcast(dy * a, shapes.b) : Tensor{}};
  }
};

struct MulNumber {
  static constexpr bool composed = true;
  double b;

  Tensor forward(Context&, const Tensor& a) const { return compute(functions::Mul{}, a, b); }
  Tensor backward(Context&, const Tensor& dy) const { return dy * b; }
};

struct Div {
  static constexpr bool composed = true;
  OperandShapes shapes{};

  Tensor forward(Context& ctx, const Tensor& a, const Tensor& b) {
    shapes.remember(ctx, a, b);
    ctx.save_for_backward(ctx.needs_grad(1) ? a : Tensor{}, b);
    return compute(functions::Div{}, a, b);
  }
  Tensors backward(Context& ctx, const Tensor& dy) const {
    const auto [a, b] = ctx.saved<2>();
    const Tensor da = dy / b;
    return {ctx.needs_grad(0) ? detail::unbroadcast(da, shapes.a) : Tensor{},
            ctx.needs_grad(1) ? neg(detail::unbroadcast(da * (a / b), shapes.b)) : Tensor{}};
  }
};

struct DivByNumber {
  static constexpr bool composed = true;
  double b;

  Tensor forward(Context&, const Tensor& a) const { return compute(functions::Div{}, a, b); }
  Tensor backward(Context&, const Tensor& dy) const { return dy / b; }
};

struct DivNumber {
  static constexpr bool composed = true;
  double a;

  Tensor forward(Context& ctx, const Tensor& b) const {
    ctx.save_for_backward(b);
    return compute(functions::Div{}, a, b);
  }
  Tensor backward(Context& ctx, const Tensor& dy) const {
    const auto [b] = ctx.saved<1>();
    return dy / b * (-a / b);
  }
};

// A piecewise constant function, so its gradients are 0.
struct FloorDivide {
  static constexpr bool composed = true;

  Tensor forward(Context& ctx, const Tensor& a, const Tensor& b) const {
    ctx.save_for_backward(a, b);
    return compute(functions::FloorDivide{}, a, b);
  }
  Tensors backward(Context& ctx, const Tensor&) const {
    const auto [a, b] = ctx.saved<2>();
    return {ctx.needs_grad(0) ? zeros_like(a) : Tensor{}, ctx.needs_grad(1) ? zeros_like(b) : Tensor{}};
  }
};

struct FloorDivideByNumber {
  static constexpr bool composed = true;
  double b;

  Tensor forward(Context&, const Tensor& a) const { return compute(functions::FloorDivide{}, a, b); }
  Tensor backward(Context&, const Tensor& dy) const { return zeros_like(dy); }
};

struct FloorDivideNumber {
  static constexpr bool composed = true;
  double a;

  Tensor forward(Context&, const Tensor& b) const { return compute(functions::FloorDivide{}, a, b); }
  Tensor backward(Context&, const Tensor& dy) const { return zeros_like(dy); }
};

// dy times the partial derivative of F with respect to one argument, by a kernel. A numeric argument is passed as an
// undefined tensor.
template <class F>
struct FusedGradient {
  static constexpr bool composed = true;
  kernels::Argument by;
  double number = 0;

  Tensor forward(Context& ctx, const Tensor& dy, const Tensor& a, const Tensor& b) const {
    const Tensor dx = detail::new_result(dy.shape(), dy.dtype(), dy);
    on_device(dy.device(), [&](auto device) {
      kernels::binary_backward(device, F{}, by, dx, dy, a.defined() ? Operand(a) : Operand(number),
                               b.defined() ? Operand(b) : Operand(number));
    });
    ctx.save_for_backward(dy, a, b);
    return dx;
  }

  Tensors backward(Context& ctx, const Tensor& ddx) const {
    const auto [dy, a, b] = ctx.saved<3>();
    Tensors gradients(3);
    if (ctx.needs_grad(0)) {
      gradients[0] = autograd::apply(*this, ddx, a, b);
    }
    if (ctx.needs_grad(1)) {
      gradients[1] = second(kernels::Argument::a, ddx * dy, a, b);
    }
    if (ctx.needs_grad(2)) {
      gradients[2] = second(kernels::Argument::b, ddx * dy, a, b);
    }
    return gradients;
  }

 private:
  // t times the second derivative.
  Tensor second(kernels::Argument then, const Tensor& t, const Tensor& a, const Tensor& b) const {
    const bool by_a = then == kernels::Argument::a;
    const Tensor& of = by_a ? a : b;
    if constexpr (!std::is_same_v<F, functions::Pow>) {
      return zeros_like(of);  // F is piecewise linear
    } else {
      if (!by_a && by == kernels::Argument::b) {  // aᵇ ln² a
        const Tensor base = a.defined() ? a : full({}, number, t.dtype(), t.device());
        // 0 where the first derivative is
        const Tensor log_a = log(where(logical_and(eq(base, 0), ge(b, 0)), 1, base));
        return detail::unbroadcast(autograd::apply(FusedGradient{by, number}, t * log_a, a, b), of.shape());
      }
      // The derivative of b aᵇ⁻¹ by a is b times that of aᵇ⁻¹. Its derivative by b, which is also that of aᵇ ln a by a,
      // is b times that of aᵇ⁻¹, plus aᵇ⁻¹.
      const kernels::Argument other = by_a && by == kernels::Argument::a ? by : kernels::Argument::b;
      // Both are tensors here. Where b is 0, aᵇ is constant, and the exponent is replaced, since 0 · a⁻² is NaN for a =
      // 0.
      const Tensor lower = other == kernels::Argument::a ? where(eq(b, 0), 1, b - 1) : b - 1;
      Tensor result = autograd::apply(FusedGradient{other, number}, t * b, a, lower);
      if (other == kernels::Argument::b) {
        result = result + t * pow(a, lower);
      }
      return detail::unbroadcast(result, of.shape());
    }
  }
};

// For Fmod, Pow, Maximum and Minimum, whose gradients have their own kernels.
template <class F>
struct Fused {
  static constexpr bool composed = true;

  Tensor forward(Context& ctx, const Tensor& a, const Tensor& b) const {
    ctx.save_for_backward(a, b);
    return compute(F{}, a, b);
  }
  Tensors backward(Context& ctx, const Tensor& dy) const {
    const auto [a, b] = ctx.saved<2>();
    const auto by = [&, &a = a, &b = b](kernels::Argument argument) {
      return autograd::apply(FusedGradient<F>{argument}, dy, a, b);
    };
    return {ctx.needs_grad(0) ? detail::unbroadcast(by(kernels::Argument::a), a.shape()) : Tensor{},
            ctx.needs_grad(1) ? detail::unbroadcast(by(kernels::Argument::b), b.shape()) : Tensor{}};
  }
};

struct Fmod : Fused<functions::Fmod> {};
struct Pow : Fused<functions::Pow> {};
struct Maximum : Fused<functions::Maximum> {};
struct Minimum : Fused<functions::Minimum> {};

template <class F>
struct FusedWithNumber {
  static constexpr bool composed = true;
  double b;

  Tensor forward(Context& ctx, const Tensor& a) const {
    ctx.save_for_backward(a);
    return compute(F{}, a, b);
  }
  Tensor backward(Context& ctx, const Tensor& dy) const {
    const auto [a] = ctx.saved<1>();
    return autograd::apply(FusedGradient<F>{kernels::Argument::a, b}, dy, a, Tensor{});
  }
};

struct FmodNumber : FusedWithNumber<functions::Fmod> {};
struct MaximumNumber : FusedWithNumber<functions::Maximum> {};
struct MinimumNumber : FusedWithNumber<functions::Minimum> {};

template <class F>
struct FusedOfNumber {
  static constexpr bool composed = true;
  double a;

  Tensor forward(Context& ctx, const Tensor& b) const {
    ctx.save_for_backward(b);
    return compute(F{}, a, b);
  }
  Tensor backward(Context& ctx, const Tensor& dy) const {
    const auto [b] = ctx.saved<1>();
    return autograd::apply(FusedGradient<F>{kernels::Argument::b, a}, dy, Tensor{}, b);
  }
};

struct FmodOfNumber : FusedOfNumber<functions::Fmod> {};
struct PowOfNumber : FusedOfNumber<functions::Pow> {};

// Records an op of two tensors; under Autocast, converts them to a common dtype first.
template <class F>
Tensor of_both(F f, const Tensor& a, const Tensor& b) {
  if (autograd::autocast_promotes(a, b)) {
    return autograd::apply(f, autograd::widened(a), autograd::widened(b));
  }
  return autograd::apply(f, a, b);
}

}  // namespace

Tensor add(const Tensor& a, const Tensor& b) { return of_both(Add{}, a, b); }
Tensor add(const Tensor& a, double b) { return autograd::apply(AddNumber{b}, a); }
Tensor add(double a, const Tensor& b) { return add(b, a); }

Tensor sub(const Tensor& a, const Tensor& b) { return of_both(Sub{}, a, b); }
Tensor sub(const Tensor& a, double b) { return autograd::apply(SubNumber{b}, a); }
Tensor sub(double a, const Tensor& b) { return autograd::apply(SubFromNumber{a}, b); }

Tensor mul(const Tensor& a, const Tensor& b) { return of_both(Mul{}, a, b); }
Tensor mul(const Tensor& a, double b) { return autograd::apply(MulNumber{b}, a); }
Tensor mul(double a, const Tensor& b) { return mul(b, a); }

Tensor div(const Tensor& a, const Tensor& b) { return of_both(Div{}, a, b); }
Tensor div(const Tensor& a, double b) { return autograd::apply(DivByNumber{b}, a); }
Tensor div(double a, const Tensor& b) { return autograd::apply(DivNumber{a}, b); }

Tensor floor_divide(const Tensor& a, const Tensor& b) { return of_both(FloorDivide{}, a, b); }
Tensor floor_divide(const Tensor& a, double b) { return autograd::apply(FloorDivideByNumber{b}, a); }
Tensor floor_divide(double a, const Tensor& b) { return autograd::apply(FloorDivideNumber{a}, b); }
Tensor fmod(const Tensor& a, const Tensor& b) { return of_both(Fmod{}, a, b); }
Tensor fmod(const Tensor& a, double b) { return autograd::apply(FmodNumber{{.b = detail::rounded(b, a.dtype())}}, a); }
Tensor fmod(double a, const Tensor& b) {
  return autograd::apply(FmodOfNumber{{.a = detail::rounded(a, b.dtype())}}, b);
}

Tensor pow(const Tensor& a, const Tensor& b) { return autograd::apply(Pow{}, a, b); }
Tensor pow(double a, const Tensor& b) { return autograd::apply(PowOfNumber{{.a = a}}, b); }

Tensor maximum(const Tensor& a, const Tensor& b) { return of_both(Maximum{}, a, b); }
Tensor maximum(const Tensor& a, double b) {
  return autograd::apply(MaximumNumber{{.b = detail::rounded(b, a.dtype())}}, a);
}
Tensor minimum(const Tensor& a, const Tensor& b) { return of_both(Minimum{}, a, b); }
Tensor minimum(const Tensor& a, double b) {
  return autograd::apply(MinimumNumber{{.b = detail::rounded(b, a.dtype())}}, a);
}

}  // namespace mica

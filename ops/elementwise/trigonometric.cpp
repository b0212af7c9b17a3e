#include <mica/autograd/function.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/detail/forward_kernels.h>
#include <mica/ops/elementwise/detail/operands.h>
#include <mica/ops/elementwise/trigonometric.h>
#include <mica/ops/elementwise/unary.h>

namespace mica {

namespace {

// (1 − x²) without the cancellation near |x| = 1.
Tensor one_minus_square(const Tensor& x) { return (1 - x) * (1 + x); }

Tensor derivative(functions::Tan, const Tensor& x) { return pow(tan(x), 2) + 1; }
Tensor derivative(functions::Asin, const Tensor& x) { return rsqrt(one_minus_square(x)); }
Tensor derivative(functions::Acos, const Tensor& x) { return neg(rsqrt(one_minus_square(x))); }
Tensor derivative(functions::Atan, const Tensor& x) { return 1 / (pow(x, 2) + 1); }
Tensor derivative(functions::Sinh, const Tensor& x) { return cosh(x); }
Tensor derivative(functions::Cosh, const Tensor& x) { return sinh(x); }
Tensor derivative(functions::Asinh, const Tensor& x) { return rsqrt(pow(x, 2) + 1); }
Tensor derivative(functions::Acosh, const Tensor& x) { return rsqrt((x - 1) * (x + 1)); }
Tensor derivative(functions::Atanh, const Tensor& x) { return 1 / one_minus_square(x); }

template <class F>
struct Trigonometric {
  static constexpr bool composed = true;

  Tensor forward(autograd::Context& ctx, const Tensor& x) const {
    check(is_floating(x.dtype()), "{}: expected a floating dtype, got {}", F::name, x.dtype());
    const Tensor y = empty(x.shape(), x.dtype(), x.device());
    on_device(x.device(), [&](auto device) { kernels::forward_unary(device, F{}, y, x); });
    ctx.save_for_backward(x);
    return y;
  }
  Tensor backward(autograd::Context& ctx, const Tensor& dy) const {
    const auto [x] = ctx.saved<1>();
    const DType wide = accumulate_dtype(dy.dtype());
    return (dy.to(wide) * derivative(F{}, x.to(wide))).to(dy.dtype());
  }
};

// One type per op, so that errors name it.
struct Tan : Trigonometric<functions::Tan> {};
struct Asin : Trigonometric<functions::Asin> {};
struct Acos : Trigonometric<functions::Acos> {};
struct Atan : Trigonometric<functions::Atan> {};
struct Sinh : Trigonometric<functions::Sinh> {};
struct Cosh : Trigonometric<functions::Cosh> {};
struct Asinh : Trigonometric<functions::Asinh> {};
struct Acosh : Trigonometric<functions::Acosh> {};
struct Atanh : Trigonometric<functions::Atanh> {};

struct Atan2 {
  static constexpr bool composed = true;

  Tensor forward(autograd::Context& ctx, const Tensor& y, const Tensor& x) const {
    const Tensor angle = empty(detail::common_shape(y, x, "atan2"), y.dtype(), y.device());
    on_device(y.device(), [&](auto device) { kernels::forward_binary(device, functions::Atan2{}, angle, y, x); });
    ctx.save_for_backward(y, x);
    return angle;
  }
  Tensors backward(autograd::Context& ctx, const Tensor& dangle) const {
    const auto [narrow_y, narrow_x] = ctx.saved<2>();
    const DType wide = accumulate_dtype(dangle.dtype());
    const Tensor y = narrow_y.to(wide), x = narrow_x.to(wide);
    const Tensor t = dangle.to(wide) / (pow(y, 2) + pow(x, 2));
    return {ctx.needs_grad(0) ? detail::unbroadcast(t * x, y.shape()).to(dangle.dtype()) : Tensor{},
            ctx.needs_grad(1) ? detail::unbroadcast(neg(t * y), x.shape()).to(dangle.dtype()) : Tensor{}};
  }
};

}  // namespace

Tensor tan(const Tensor& x) { return autograd::apply(Tan{}, x); }
Tensor asin(const Tensor& x) { return autograd::apply(Asin{}, x); }
Tensor acos(const Tensor& x) { return autograd::apply(Acos{}, x); }
Tensor atan(const Tensor& x) { return autograd::apply(Atan{}, x); }
Tensor sinh(const Tensor& x) { return autograd::apply(Sinh{}, x); }
Tensor cosh(const Tensor& x) { return autograd::apply(Cosh{}, x); }
Tensor asinh(const Tensor& x) { return autograd::apply(Asinh{}, x); }
Tensor acosh(const Tensor& x) { return autograd::apply(Acosh{}, x); }
Tensor atanh(const Tensor& x) { return autograd::apply(Atanh{}, x); }
Tensor atan2(const Tensor& y, const Tensor& x) { return autograd::apply(Atan2{}, y, x); }

}  // namespace mica

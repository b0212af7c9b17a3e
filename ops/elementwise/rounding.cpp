#include <mica/autograd/function.h>
#include <mica/core/creation.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/detail/forward_kernels.h>
#include <mica/ops/elementwise/rounding.h>

namespace mica {

namespace {

// Functions whose derivative is taken to be 0, at the jumps, too.
template <class F>
struct Step {
  static constexpr bool composed = true;

  Tensor forward(autograd::Context&, const Tensor& x) const {
    const Tensor y = empty(x.shape(), x.dtype(), x.device());
    on_device(x.device(), [&](auto device) { kernels::forward_unary(device, F{}, y, x); });
    return y;
  }
  Tensor backward(autograd::Context&, const Tensor& dy) const { return zeros_like(dy); }
};

struct Sign : Step<functions::Sign> {};
struct Trunc : Step<functions::Trunc> {};

}  // namespace

Tensor sign(const Tensor& x) { return autograd::apply(Sign{}, x); }
Tensor trunc(const Tensor& x) { return autograd::apply(Trunc{}, x); }
Tensor frac(const Tensor& x) {
  check(is_floating(x.dtype()), "frac: expected a floating dtype, got {}", x.dtype());
  return x - trunc(x);
}

}  // namespace mica

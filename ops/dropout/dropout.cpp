#include <mica/autograd/function.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/ops/dropout/detail/dropout_kernels.h>
#include <mica/ops/dropout/detail/dropped.h>
#include <mica/ops/dropout/dropout.h>

namespace mica {

namespace {

struct DropoutElements {
  static constexpr bool composed = true;
  ElementDropout dropout;

  Tensor forward(autograd::Context&, const Tensor& x) const {
    const Tensor from = contiguous_data(x);
    const Tensor y = empty_like(x);
    detail::write_dropped(y, from, dropout);
    return y;
  }
  // Dropout multiplies each element by a constant, so that backward is the same function, applied to dy.
  Tensor backward(autograd::Context&, const Tensor& dy) const { return autograd::apply(*this, dy); }
};

}  // namespace

namespace detail {

void write_dropped(const Tensor& y, const Tensor& x, const ElementDropout& dropout) {
  const kernels::Dropout args{.y = y, .x = x, .dropout = dropout};
  on_device(x.device(), [&](auto device) { kernels::dropout(device, args); });
}

Tensor dropped(const Tensor& x, const ElementDropout& dropout) { return autograd::apply(DropoutElements{dropout}, x); }

}  // namespace detail

Tensor dropout(const Tensor& x, double p, bool training) {
  check(p >= 0 && p < 1, "dropout: expected p in [0, 1), got {}", p);
  check(is_floating(x.dtype()), "dropout: expected a floating dtype, got {}", x.dtype());
  if (!training || p == 0) {
    return x;
  }
  return detail::dropped(x, {.key = next_philox_key(), .threshold = ElementDropout::threshold_of(p)});
}

}  // namespace mica

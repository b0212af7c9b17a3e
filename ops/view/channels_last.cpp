#include <mica/autograd/function.h>
#include <mica/core/copy.h>
#include <mica/ops/view/channels_last.h>

namespace mica {

namespace {

struct ChannelsLast {
  static constexpr bool composed = true;

  Tensor forward(autograd::Context&, const Tensor& x) const {
    const Tensor y = empty_channels_last(x.shape(), x.dtype(), x.device());
    copy_into(y, x);
    return y;
  }
  Tensor backward(autograd::Context&, const Tensor& dy) const { return dy; }
};

}  // namespace

Tensor channels_last(const Tensor& x) {
  check(x.dim() == 4 || x.dim() == 5, "channels_last: expected a tensor of 4 or 5 axes, got shape {}", x.shape());
  return is_channels_last(x) ? x : autograd::apply(ChannelsLast{}, x);
}

}  // namespace mica

#include "swiglu.h"

#include "swiglu_kernels.h"
#include <mica/mica.h>

using namespace mica;

namespace custom {

struct Swiglu {
  static constexpr bool composed = true;  // so that grad() with create_graph can differentiate backward

  Tensor forward(autograd::Context& ctx, const Tensor& gate, const Tensor& up) const {
    ctx.save_for_backward(gate, up);
    const Tensor y = empty(gate.shape(), gate.dtype(), gate.device());
    on_device(y.device(), [&](auto device) { swiglu_forward(device, y, gate, up); });
    return y;
  }

  Tensors backward(autograd::Context& ctx, const Tensor& dy) const {
    const auto [gate, up] = ctx.saved<2>();
    if (autograd::grad_enabled()) {  // second derivatives are needed: compute the gradient by recorded ops
      const Tensor s = sigmoid(gate);
      return {dy * up * s * (1 + gate * (1 - s)), dy * gate * s};
    }
    const SwigluBackward args{.dy = contiguous(dy),
                              .gate = contiguous(gate),
                              .up = contiguous(up),
                              .dgate = empty_like(gate),
                              .dup = empty_like(up)};
    on_device(dy.device(), [&](auto device) { swiglu_backward(device, args); });
    return {args.dgate, args.dup};
  }
};

Tensor swiglu(const Tensor& gate, const Tensor& up) {
  check(up.shape() == gate.shape() && up.dtype() == gate.dtype() && up.device() == gate.device(),
        "swiglu: expected up like gate, {} {} on {}, got {} {} on {}", gate.dtype(), gate.shape(), gate.device(),
        up.dtype(), up.shape(), up.device());
  return autograd::apply(Swiglu{}, gate, up);
}

}  // namespace custom

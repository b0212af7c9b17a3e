#include <cmath>

#include <mica/autograd/function.h>
#include <mica/core/copy.h>
#include <mica/ops/rotary/detail/rotary_kernels.h>
#include <mica/ops/rotary/rotary.h>

namespace mica {

namespace {

constexpr std::int64_t kMostHeads = std::int64_t{4} * 65535;  // of the CUDA kernel's grid

struct Rotary {
  static constexpr bool composed = true;
  std::vector<float> frequencies;
  std::int64_t offset;
  double scale;
  bool back;

  Tensor forward(autograd::Context& ctx, const Tensor& x, const Tensor& positions) const {
    ctx.save_for_backward(positions);
    const Tensor y = empty(x.shape(), x.dtype(), x.device());
    if (y.numel() > 0) {
      const std::int64_t heads = x.size(-2);
      const kernels::Rotary args{.x = contiguous_data(x),
                                 .positions = positions,
                                 .rows = x.numel() / (heads * x.size(-1)),
                                 .steps = x.size(-3),
                                 .heads = heads,
                                 .offset = offset,
                                 .frequencies = frequencies,
                                 .scale = scale,
                                 .back = back,
                                 .y = y};
      on_device(y.device(), [&](auto device) { kernels::rotary(device, args); });
    }
    return y;
  }

  Tensors backward(autograd::Context& ctx, const Tensor& dy) const {
    const Tensor positions = ctx.saved<1>()[0];
    return {autograd::apply(Rotary{frequencies, offset, scale, !back}, dy, positions), {}};
  }
};

}  // namespace

Tensor rotary(const Tensor& x, const std::vector<float>& frequencies, const RotaryOptions& options) {
  check(x.dim() >= 3 && is_floating(x.dtype()), "rotary: expected floating x of shape (…, T, H, D), got {} {}",
        x.dtype(), x.shape());
  const std::int64_t width = x.size(-1);
  check(width >= 2 && width % 2 == 0 && width <= 2 * kernels::kMostRotaryPairs,
        "rotary: expected heads of even width from 2 to {}, got {}", 2 * kernels::kMostRotaryPairs, width);
  check(x.size(-2) <= kMostHeads, "rotary: expected at most {} heads, got {}", kMostHeads, x.size(-2));
  check(static_cast<std::int64_t>(frequencies.size()) == width / 2,
        "rotary: expected {} frequencies for heads of width {}, got {}", width / 2, width, frequencies.size());
  check(std::isfinite(options.scale), "rotary: expected a finite scale, got {}", options.scale);
  Tensor positions = options.positions;
  if (positions.defined()) {
    const Shape rows = x.shape().slice(0, x.dim() - 2);
    check(positions.dtype() == int64 || positions.dtype() == int32,
          "rotary: expected positions of int64 or int32, got {}", positions.dtype());
    check(positions.shape() == rows || positions.shape() == Shape{x.size(-3)},
          "rotary: expected positions of shape {} or {}, got {}", rows, Shape{x.size(-3)}, positions.shape());
    check(positions.device() == x.device(), "rotary: expected positions on {}, got them on {}", x.device(),
          positions.device());
    positions = contiguous_data(positions.to(int64));
  }
  return autograd::apply(Rotary{frequencies, options.offset, options.scale, false}, x, positions);
}

}  // namespace mica

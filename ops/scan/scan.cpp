#include <mica/autograd/function.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/ops/scan/detail/scan_kernels.h>
#include <mica/ops/scan/scan.h>
#include <mica/ops/view/view.h>

namespace mica {

namespace {

// The cumulative sum along the last axis. The gradient is the cumulative sum in the other direction: dx[i] = Σ dy[j]
// over j ≥ i.
struct Cumsum {
  static constexpr bool composed = true;
  bool reverse;

  Tensor forward(autograd::Context&, const Tensor& x) const {
    const Tensor y = empty(x.shape(), x.dtype(), x.device());
    if (x.numel() > 0) {
      const std::int64_t n = x.size(-1);
      const Tensor rows = view(contiguous_data(x), {-1, n}), sums = view(y, {-1, n});
      const kernels::Cumsum args{.x = rows, .y = sums, .reverse = reverse};
      on_device(x.device(), [&](auto device) { kernels::cumsum(device, args); });
    }
    return y;
  }
  Tensor backward(autograd::Context&, const Tensor& dy) const { return autograd::apply(Cumsum{!reverse}, dy); }
};

}  // namespace

Tensor cumsum(const Tensor& x, std::int64_t axis) {
  const int at = normalize_axis(axis, x.dim(), "cumsum");
  const Tensor summed = is_floating(x.dtype()) ? x : x.to(int64);
  if (at == x.dim() - 1) {
    return autograd::apply(Cumsum{false}, summed);
  }
  return transpose(autograd::apply(Cumsum{false}, transpose(summed, at, -1)), at, -1);
}

}  // namespace mica

#include <cmath>
#include <cstdint>

#include <mica/core/check.h>
#include <mica/core/creation.h>
#include <mica/nn/detail/visible_tokens.h>
#include <mica/nn/pooling.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/elementwise/where.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/scan/scan.h>
#include <mica/ops/view/view.h>

namespace mica::nn {

Tensor pool_tokens(const Tensor& features, const Tensor& visible, Pooling pooling) {
  check(features.dim() == 3 && features.size(1) >= 1,
        "pool_tokens: expected features of shape (B, T, C), T >= 1, got {}", features.shape());
  check(is_floating(features.dtype()), "pool_tokens: expected floating features, got {}", features.dtype());
  const std::int64_t batch = features.size(0), length = features.size(1);
  const Device device = features.device();
  const Tensor seen = visible.defined() ? detail::visible_tokens("pool_tokens", visible, batch, length)
                                        : ones({batch, length}, boolean, device);
  if (pooling == Pooling::first) {
    return select(features, 1, 0);
  }
  if (pooling == Pooling::max) {
    return amax(masked_fill(features, logical_not(unsqueeze(seen, 2)), -INFINITY), {1});
  }
  const DType dtype = features.dtype() == float64 ? float64 : float32;
  const Tensor positions = cumsum(ones({1, length}, dtype, device), 1);  // 1, 2, …
  Tensor weights = seen.to(dtype);
  if (pooling == Pooling::weighted_mean) {
    weights = weights * positions;
  } else if (pooling == Pooling::last) {
    const Tensor last = amax(positions * weights, {1}, true);
    weights = weights * (positions == last).to(dtype);
  }
  const Tensor total = clamp(sum(weights, {1}, true), 1, INFINITY);
  const Tensor sums = sum(features.to(dtype) * unsqueeze(weights, 2), {1});
  return (sums / (pooling == Pooling::mean_sqrt_length ? sqrt(total) : total)).to(features.dtype());
}

}  // namespace mica::nn

#include <algorithm>
#include <cmath>

#include <mica/autograd/function.h>
#include <mica/core/capture.h>
#include <mica/core/creation.h>
#include <mica/ops/elementwise/between.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/elementwise/where.h>
#include <mica/ops/grid/grid.h>
#include <mica/ops/index/index.h>
#include <mica/ops/join/join.h>
#include <mica/ops/search/search.h>
#include <mica/ops/sort/sort.h>
#include <mica/ops/statistics/statistics.h>
#include <mica/ops/view/view.h>

namespace mica {

namespace {

// One element of x, whose gradient is shared by all elements equal to it.
struct SharedElement {
  static constexpr bool composed = true;

  Tensor forward(autograd::Context& ctx, const Tensor& x, const Tensor& element) const {
    ctx.save_for_backward(x, element);
    return clone(element);
  }
  Tensors backward(autograd::Context& ctx, const Tensor& dy) const {
    const auto [x, element] = ctx.saved<2>();
    const Tensor a = x.detach(), b = element.detach();
    const Tensor equal = logical_or(eq(a, b), logical_and(isnan(a), isnan(b)));
    const Tensor share = dy / sum(equal).to(dy.dtype());
    return {where(equal, share, zeros_like(share)), Tensor{}};
  }
};

// The position of the median along an axis of x, which is kept with length 1.
Tensor median_index(const char* op, const Tensor& x, int axis) {
  check(x.dtype() != boolean, "{}: expected a numeric dtype, got bool", op);
  const std::int64_t n = x.shape()[axis];
  check(n > 0, "{}: expected an axis with elements, got axis {} of shape {}", op, axis, x.shape());
  const std::int64_t half = (n - 1) / 2;
  const Tensor indices = slice(topk(x.detach(), half + 1, axis, false).indices, axis, half, half + 1);
  if (!is_floating(x.dtype())) {
    return indices;
  }
  const MaxResult largest = max(x.detach(), axis, true);
  return where(isnan(largest.values), largest.indices, indices);
}

}  // namespace

Tensor median(const Tensor& x) {
  check(x.numel() > 0, "median: expected at least one element, got shape {}", x.shape());
  const Tensor elements = reshape(x, {x.numel()});
  const Tensor element = gather(elements.detach(), 0, median_index("median", elements, 0));
  return autograd::apply(SharedElement{}, x, reshape(element, {}));
}

MaxResult median(const Tensor& x, std::int64_t axis, bool keepdim) {
  const int at = normalize_axis(axis, x.dim(), "median");
  const Tensor indices = median_index("median", x, at);
  const Tensor values = gather(x, at, indices);
  return keepdim ? MaxResult{.values = values, .indices = indices}
                 : MaxResult{.values = squeeze(values, at), .indices = squeeze(indices, at)};
}

Tensor quantile(const Tensor& x, const std::vector<double>& qs, std::optional<std::int64_t> axis, bool keepdim,
                Interpolation interpolation) {
  check(is_floating(x.dtype()), "quantile: expected a floating dtype, got {}", x.dtype());
  check(interpolation <= Interpolation::nearest, "quantile: expected one of the enumerators of Interpolation, got {}",
        static_cast<int>(interpolation));
  check(!qs.empty(), "quantile: expected at least one quantile");
  const int at = axis ? normalize_axis(*axis, x.dim(), "quantile") : 0;
  const Tensor flat = axis ? x : reshape(x, {x.numel()});
  const std::int64_t n = flat.shape()[at];
  check(n > 0, "quantile: expected at least one element, got shape {}", x.shape());
  const Tensor sorted = sort(flat, at).values;
  const auto element = [&](double rank) {
    const auto position = static_cast<std::int64_t>(rank);
    return slice(sorted, at, position, position + 1).to(accumulate_dtype(x.dtype()));
  };
  const Tensor last = element(static_cast<double>(n - 1));
  Shape shape = flat.shape();
  shape[at] = 1;
  if (!keepdim) {
    shape.erase(at);
  } else if (!axis) {
    shape = Shape::filled(x.dim(), 1);
  }
  Tensors results;
  for (const double q : qs) {
    check(q >= 0 && q <= 1, "quantile: expected q from 0 to 1, got {}", q);
    const double rank = q * static_cast<double>(n - 1);
    const double low = std::floor(rank), high = std::ceil(rank);
    const Tensor y = interpolation == Interpolation::lower      ? element(low)
                     : interpolation == Interpolation::higher   ? element(high)
                     : interpolation == Interpolation::nearest  ? element(std::nearbyint(rank))
                     : low == high                              ? element(low)
                     : interpolation == Interpolation::midpoint ? lerp(element(low), element(high), 0.5)
                                                                : lerp(element(low), element(high), rank - low);
    results.push_back(reshape(where(isnan(last), last, y).to(x.dtype()), shape));
  }
  return stack(results);
}

Tensor quantile(const Tensor& x, double q, std::optional<std::int64_t> axis, bool keepdim,
                Interpolation interpolation) {
  return select(quantile(x, std::vector<double>{q}, axis, keepdim, interpolation), 0, 0);
}

VarMeanResult var_mean(const Tensor& x, const Dims& axes, double correction, bool keepdim) {
  return {.var = var(x, axes, correction, keepdim), .mean = mean(x, axes, keepdim)};
}

StddevMeanResult stddev_mean(const Tensor& x, const Dims& axes, double correction, bool keepdim) {
  return {.stddev = stddev(x, axes, correction, keepdim), .mean = mean(x, axes, keepdim)};
}

Tensor bincount(const Tensor& x, const Tensor& weights, std::int64_t minlength) {
  check(x.dim() == 1, "bincount: expected one axis, got shape {}", x.shape());
  check(!is_floating(x.dtype()) && x.dtype() != boolean, "bincount: expected an integer dtype, got {}", x.dtype());
  check(minlength >= 0, "bincount: expected a minlength of at least 0, got {}", minlength);
  if (weights.defined()) {
    check(weights.shape() == x.shape() && is_floating(weights.dtype()) && weights.device() == x.device(),
          "bincount: expected floating weights of shape {} on {}, got {} {} on {}", x.shape(), x.device(),
          weights.dtype(), weights.shape(), weights.device());
  }
  if (x.device().is_cuda()) {
    check_not_capturing("bincount");
  }
  std::int64_t length = minlength;
  if (x.numel() > 0) {
    const double least = min(x).item(), most = max(x).item();
    check(least >= 0, "bincount: expected elements of at least 0, got {}", least);
    length = std::max(length, static_cast<std::int64_t>(most) + 1);
  }
  const Tensor counted = weights.defined() ? weights : ones(x.shape(), int64, x.device());
  return index_add(zeros({length}, counted.dtype(), x.device()), 0, x.to(int64), counted);
}

namespace {

// The two ends of the bins.
std::array<double, 2> range_of(const Tensor& x, const HistogramOptions& options) {
  std::array<double, 2> range{0, 1};
  if (options.range) {
    range = *options.range;
  } else if (x.numel() > 0) {
    if (x.device().is_cuda()) {
      check_not_capturing("histogram");
    }
    range = {min(x).item(), max(x).item()};
  }
  check(std::isfinite(range[0]) && std::isfinite(range[1]) && range[0] <= range[1],
        "histogram: expected a finite ascending range, got {} to {}", range[0], range[1]);
  if (range[0] == range[1]) {
    range = {range[0] - 0.5, range[1] + 0.5};
  }
  return range;
}

}  // namespace

HistogramResult histogram(const Tensor& x, const Tensor& edges, const HistogramOptions& options) {
  check(is_floating(x.dtype()), "histogram: expected a floating dtype, got {}", x.dtype());
  check(edges.dim() == 1 && edges.numel() >= 2, "histogram: expected at least 2 edges along one axis, got shape {}",
        edges.shape());
  check(edges.dtype() == x.dtype() && edges.device() == x.device(),
        "histogram: expected edges of {} on {}, got {} on {}", x.dtype(), x.device(), edges.dtype(), edges.device());
  const DType wide = accumulate_dtype(x.dtype());
  const Tensor elements = reshape(x.detach(), {x.numel()}).to(wide), bounds = edges.detach().to(wide);
  const std::int64_t bins = edges.numel() - 1;
  const Tensor first = slice(bounds, 0, 0, 1), last = slice(bounds, 0, bins, bins + 1);
  const Tensor inside = logical_and(ge(elements, first), le(elements, last));
  const auto outside_bin = static_cast<double>(bins);  // an additional one
  const Tensor bin = minimum(searchsorted(bounds, elements, true) - 1, outside_bin - 1);
  Tensor weight = ones(elements.shape(), int64, x.device());
  if (options.weight.defined()) {
    check(options.weight.shape() == x.shape() && options.weight.dtype() == x.dtype() &&
              options.weight.device() == x.device(),
          "histogram: expected a weight of {} {} on {}, got {} {} on {}", x.dtype(), x.shape(), x.device(),
          options.weight.dtype(), options.weight.shape(), options.weight.device());
    weight = reshape(options.weight.detach(), elements.shape()).to(wide);
  }
  const Tensor sums =
      index_add(zeros({bins + 1}, weight.dtype(), x.device()), 0, where(inside, bin, outside_bin), weight);
  Tensor counts = slice(sums, 0, 0, bins).to(wide);
  if (options.density) {
    counts = counts / (sum(counts) * (slice(bounds, 0, 1, bins + 1) - slice(bounds, 0, 0, bins)));
  }
  return {.counts = contiguous(counts), .edges = bounds};
}

HistogramResult histogram(const Tensor& x, std::int64_t bins, const HistogramOptions& options) {
  check(is_floating(x.dtype()), "histogram: expected a floating dtype, got {}", x.dtype());
  check(bins >= 1, "histogram: expected at least one bin, got {}", bins);
  const std::array<double, 2> range = range_of(x.detach(), options);
  const DType wide = accumulate_dtype(x.dtype());
  HistogramOptions wide_options = options;
  if (options.weight.defined()) {
    wide_options.weight = options.weight.to(wide);
  }
  return histogram(x.to(wide), linspace(range[0], range[1], bins + 1, wide, x.device()), wide_options);
}

}  // namespace mica

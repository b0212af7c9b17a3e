#include <algorithm>
#include <array>
#include <cmath>

#include <mica/autograd/function.h>
#include <mica/ops/images/detail/image_grid.h>
#include <mica/ops/pool/pool.h>
#include <mica/ops/sample/detail/sample_kernels.h>
#include <mica/ops/sample/sample.h>

namespace mica {

namespace {

using kernels::AxisInterpolation;

// The images at the positions of `axes`, or the transpose of this linear map.
struct Resampling {
  static constexpr bool composed = true;
  std::array<AxisInterpolation, 3> of_axes;  // the first ones are unused if there are less than three
  int axes;
  bool channels_last;
  bool transposed = false;

  Tensor forward(autograd::Context&, const Tensor& from) const {
    const Tensor source = images::in_layout(from, channels_last);
    Shape shape = from.shape();
    for (int i = 0; i < axes; ++i) {
      shape[2 + i] = of_axes[3 - axes + i].rows(transposed);
    }
    const Tensor to = images::empty_images(shape, from.dtype(), from.device(), channels_last);
    kernels::Resample args{.channels_last = channels_last, .x = source, .y = to, .positions = {}, .weights = {}};
    on_device(from.device(), [&](auto device) {
      for (int i = 3 - axes; i < 3; ++i) {
        const AxisInterpolation& axis = of_axes[i];
        const Shape table{axis.rows(transposed), most_terms(axis)};
        args.positions[i] = empty(table, int32, from.device());
        args.weights[i] = empty(table, accumulate_dtype(from.dtype()), from.device());
        kernels::interpolation_table(
            device,
            {.axis = axis, .transposed = transposed, .positions = args.positions[i], .weights = args.weights[i]});
      }
      kernels::resample(device, args);
    });
    return to;
  }
  Tensor backward(autograd::Context&, const Tensor& dy) const {
    return autograd::apply(Resampling{of_axes, axes, channels_last, !transposed}, dy);
  }

 private:
  std::int64_t most_terms(const AxisInterpolation& axis) const {
    if (!transposed) {
      const bool nearest =
          axis.kind == AxisInterpolation::Kind::nearest || axis.kind == AxisInterpolation::Kind::nearest_exact;
      return nearest ? 1 : axis.kind == AxisInterpolation::Kind::linear ? 2 : AxisInterpolation::kMostTaps;
    }
    std::int64_t most = 1;
    for (int i = 0; i < axis.in; ++i) {
      std::int64_t terms = 0;
      axis.for_outputs(i, [&](int, double) { ++terms; });
      most = std::max(most, terms);
    }
    return most;
  }
};

AxisInterpolation::Kind kind_of(Interpolation mode) {
  switch (mode) {
    case Interpolation::nearest: return AxisInterpolation::Kind::nearest;
    case Interpolation::nearest_exact: return AxisInterpolation::Kind::nearest_exact;
    case Interpolation::cubic: return AxisInterpolation::Kind::cubic;
    default: return AxisInterpolation::Kind::linear;
  }
}

}  // namespace

Tensor interpolate(const Tensor& x, const InterpolateOptions& options) {
  constexpr const char* kOp = "interpolate";
  const int axes = x.dim() - 2;
  check(axes >= 1 && axes <= 3, "{}: expected x of shape (N, C, 1 to 3 spatial axes), got {}", kOp, x.shape());
  images::check_images(kOp, x, axes);
  const std::vector<double>& factors = options.scale_factor;
  check(options.size.has_value() != !factors.empty(), "{}: expected either size or scale_factor", kOp);
  check(factors.size() <= 1 || static_cast<int>(factors.size()) == axes,
        "{}: expected scale_factor of 1 or {} numbers, got {}", kOp, axes, factors.size());
  const bool interpolates = options.mode == Interpolation::linear || options.mode == Interpolation::cubic;
  check(!options.align_corners || interpolates, "{}: expected align_corners only with linear or cubic", kOp);
  Dims sizes = options.size ? images::of_axes(kOp, "size", *options.size, axes, 1) : Dims{};
  std::array<AxisInterpolation, 3> of_axes{};
  for (int i = 0; i < axes; ++i) {
    const std::int64_t in = x.shape()[2 + i];
    const double factor = factors.empty() ? 0 : factors[factors.size() == 1 ? 0 : i];
    if (!factors.empty()) {
      const double size = std::floor(static_cast<double>(in) * factor);
      check(size >= 1 && size <= INT32_MAX, "{}: expected a scale_factor that gives at least one element, got {}", kOp,
            factor);
      sizes.push_back(static_cast<std::int64_t>(size));
    }
    const auto length = [](std::int64_t n) { return static_cast<double>(n); };
    AxisInterpolation& axis = of_axes[3 - axes + i];
    axis = {.kind = kind_of(options.mode),
            .in = static_cast<int>(in),
            .out = static_cast<int>(sizes[i]),
            .align_corners = options.align_corners};
    if (options.align_corners) {
      axis.scale = sizes[i] > 1 ? length(in - 1) / length(sizes[i] - 1) : 0;
    } else {
      axis.scale = factor > 0 && !options.recompute_scale_factor ? 1 / factor : length(in) / length(sizes[i]);
    }
  }
  if (options.mode == Interpolation::area) {
    return axes == 1   ? adaptive_avg_pool1d(x, sizes)
           : axes == 2 ? adaptive_avg_pool2d(x, sizes)
                       : adaptive_avg_pool3d(x, sizes);
  }
  return autograd::apply(Resampling{of_axes, axes, images::is_last(x)}, x);
}

}  // namespace mica

#include <algorithm>
#include <array>
#include <cmath>

#include <mica/autograd/function.h>
#include <mica/core/creation.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/elementwise/where.h>
#include <mica/ops/images/detail/image_grid.h>
#include <mica/ops/index/index.h>
#include <mica/ops/pool/detail/pool_kernels.h>
#include <mica/ops/pool/pool.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>

namespace mica {

namespace {

// A pooling of images of one size.
struct Pooling {
  const char* op;
  int axes;
  bool channels_last;
  kernels::PoolWindows windows{};

  Shape output_of(const Shape& x) const { return with_sizes(x, &kernels::PoolAxis::out); }
  Shape input_of(const Shape& y) const { return with_sizes(y, &kernels::PoolAxis::in); }

 private:
  Shape with_sizes(Shape shape, int kernels::PoolAxis::*size) const {
    for (int i = 0; i < axes; ++i) {
      shape[2 + i] = windows.axes[3 - axes + i].*size;
    }
    return shape;
  }
};

// Takes the elements of images that the taps refer to or, transposed, adds elements to those places of zeros.
struct TapTransfer {
  static constexpr bool composed = true;
  Pooling pooling;
  bool adds;

  Tensor forward(autograd::Context& ctx, const Tensor& from, const Tensor& taps) const {
    const Tensor source = images::in_layout(from, pooling.channels_last);
    const Shape shape = adds ? pooling.input_of(taps.shape()) : taps.shape();
    const Tensor to = images::empty_images(shape, from.dtype(), from.device(), pooling.channels_last);
    const kernels::TapTransfer args{.windows = pooling.windows,
                                    .channels_last = pooling.channels_last,
                                    .x = adds ? to : source,
                                    .y = adds ? source : to,
                                    .taps = taps};
    on_device(to.device(),
              [&](auto device) { adds ? kernels::add_taps(device, args) : kernels::take_taps(device, args); });
    ctx.save_for_backward(taps);
    return to;
  }
  Tensors backward(autograd::Context& ctx, const Tensor& dy) const {
    return {autograd::apply(TapTransfer{pooling, !adds}, dy, ctx.saved<1>()[0]), {}};
  }
};

// x → the maxima of its windows, and their taps
struct MaxPool {
  static constexpr bool composed = true;
  Pooling pooling;

  std::array<Tensor, 2> forward(autograd::Context& ctx, const Tensor& x) const {
    const Tensor source = images::in_layout(x, pooling.channels_last);
    const Shape shape = pooling.output_of(x.shape());
    const Tensor y = images::empty_images(shape, x.dtype(), x.device(), pooling.channels_last);
    const Tensor taps =
        images::empty_images(shape, pooling.windows.taps() <= 256 ? uint8 : int32, x.device(), pooling.channels_last);
    const kernels::MaxPool args{
        .windows = pooling.windows, .channels_last = pooling.channels_last, .x = source, .y = y, .taps = taps};
    on_device(x.device(), [&](auto device) { kernels::max_pool_forward(device, args); });
    ctx.save_for_backward(taps);
    return {y, taps};
  }
  Tensor backward(autograd::Context& ctx, const Tensor& dy) const {
    return autograd::apply(TapTransfer{pooling, true}, dy, ctx.saved<1>()[0]);
  }
};

// The means of x's windows or, transposed, the gradient of x.
struct AveragePool {
  static constexpr bool composed = true;
  Pooling pooling;
  bool include_padding;
  double divisor;  // 0: the number of elements
  bool transposed = false;

  Tensor forward(autograd::Context&, const Tensor& from) const {
    const Tensor source = images::in_layout(from, pooling.channels_last);
    const Shape shape = transposed ? pooling.input_of(from.shape()) : pooling.output_of(from.shape());
    const Tensor to = images::empty_images(shape, from.dtype(), from.device(), pooling.channels_last);
    const kernels::AveragePool args{.windows = pooling.windows,
                                    .channels_last = pooling.channels_last,
                                    .x = transposed ? to : source,
                                    .y = transposed ? source : to,
                                    .include_padding = include_padding,
                                    .divisor = divisor};
    on_device(to.device(), [&](auto device) {
      transposed ? kernels::average_pool_backward(device, args) : kernels::average_pool_forward(device, args);
    });
    return to;
  }
  Tensor backward(autograd::Context&, const Tensor& dy) const {
    return autograd::apply(AveragePool{pooling, include_padding, divisor, !transposed}, dy);
  }
};

struct WindowOptions {
  PerAxis size;
  std::optional<PerAxis> stride;
  PerAxis padding = 0;
  PerAxis dilation = 1;
  bool ceil_mode = false;
};

Pooling pooling_of(const char* op, const Tensor& x, int axes, const WindowOptions& options) {
  check(axes >= 1 && axes <= 3, "{}: expected 1 to 3 spatial axes, got {}", op, axes);
  images::check_images(op, x, axes);
  const Dims size = images::of_axes(op, "size", options.size, axes, 1);
  const Dims stride = images::of_axes(op, "stride", options.stride.value_or(options.size), axes, 1);
  const Dims padding = images::of_axes(op, "padding", options.padding, axes, 0);
  const Dims dilation = images::of_axes(op, "dilation", options.dilation, axes, 1);
  Pooling pooling{.op = op, .axes = axes, .channels_last = images::is_last(x)};
  for (int i = 0; i < axes; ++i) {
    const std::int64_t length = x.shape()[x.dim() - axes + i];
    const std::int64_t reach = dilation[i] * (size[i] - 1) + 1;
    check(padding[i] <= reach / 2, "{}: expected a padding of at most half of the window, got {} for {}", op,
          Dims(options.padding), Dims(options.size));
    check(length + 2 * padding[i] >= reach && length + 2 * padding[i] + stride[i] <= INT32_MAX,
          "{}: expected x of at least the window's size, got {} and windows of {}", op, x.shape(), Dims(options.size));
    std::int64_t out = (length + 2 * padding[i] - reach + (options.ceil_mode ? stride[i] - 1 : 0)) / stride[i] + 1;
    if (options.ceil_mode && (out - 1) * stride[i] >= length + padding[i]) {
      --out;  // the last window would start in the padding
    }
    kernels::PoolAxis& axis = pooling.windows.axes[3 - axes + i];
    axis = {.in = static_cast<int>(length),
            .out = static_cast<int>(out),
            .size = static_cast<int>(size[i]),
            .stride = static_cast<int>(stride[i]),
            .padding = static_cast<int>(padding[i]),
            .dilation = static_cast<int>(dilation[i])};
    for (int o = 0; o < axis.out; ++o) {
      check(axis.first_tap(o) < axis.end_tap(o), "{}: expected windows with elements, but window {} has none", op, o);
    }
  }
  return pooling;
}

Pooling adaptive_pooling(const char* op, const Tensor& x, int axes, const PerAxis& size) {
  check(axes >= 1 && axes <= 3, "{}: expected 1 to 3 spatial axes, got {}", op, axes);
  images::check_images(op, x, axes);
  const Dims sizes = images::of_axes(op, "size", size, axes, -1);
  Pooling pooling{.op = op, .axes = axes, .channels_last = images::is_last(x)};
  for (int i = 0; i < axes; ++i) {
    const std::int64_t length = x.shape()[x.dim() - axes + i];
    const std::int64_t out = sizes[i] == -1 ? length : sizes[i];
    check(out > 0, "{}: expected sizes of at least 1, or -1, got {}", op, Dims(size));
    check(length < INT32_MAX / (out + 1), "{}: expected lengths whose product fits in 31 bits, got {} and {}", op,
          length, out);
    kernels::PoolAxis& axis = pooling.windows.axes[3 - axes + i];
    axis = {.in = static_cast<int>(length), .out = static_cast<int>(out), .adaptive = true};
    for (int o = 0; o < axis.out; ++o) {
      axis.size = std::max(axis.size, axis.end(o) - axis.first(o));
    }
  }
  return pooling;
}

MaxPoolResult max_pool_of(const Tensor& x, const Pooling& pooling, bool with_indices) {
  Tensor indices;
  const Tensor values = images::with_batch(x, pooling.axes, [&](const Tensor& batch) {
    const auto [y, taps] = autograd::apply(MaxPool{pooling}, batch);
    if (with_indices) {
      indices = images::empty_images(taps.shape(), int64, x.device(), pooling.channels_last);
      const kernels::TapPositions args{
          .windows = pooling.windows, .channels_last = pooling.channels_last, .taps = taps, .indices = indices};
      on_device(x.device(), [&](auto device) { kernels::tap_positions(device, args); });
    }
    return y;
  });
  return {values, with_indices && x.dim() == pooling.axes + 1 ? squeeze(indices, 0) : indices};
}

MaxPoolResult max_pool(const char* op, const Tensor& x, int axes, const PerAxis& size, const MaxPoolOptions& options,
                       bool with_indices = false) {
  return max_pool_of(x,
                     pooling_of(op, x, axes,
                                {.size = size,
                                 .stride = options.stride,
                                 .padding = options.padding,
                                 .dilation = options.dilation,
                                 .ceil_mode = options.ceil_mode}),
                     with_indices);
}

Tensor avg_pool_of(const Tensor& x, const Pooling& pooling, bool include_padding, double divisor) {
  return images::with_batch(x, pooling.axes, [&](const Tensor& batch) {
    return autograd::apply(AveragePool{pooling, include_padding, divisor}, batch);
  });
}

Tensor avg_pool(const char* op, const Tensor& x, int axes, const PerAxis& size, const AvgPoolOptions& options) {
  check(options.divisor_override != 0, "{}: expected a divisor_override other than 0", op);
  const Pooling pooling =
      pooling_of(op, x, axes,
                 {.size = size, .stride = options.stride, .padding = options.padding, .ceil_mode = options.ceil_mode});
  return avg_pool_of(x, pooling, options.count_include_pad, static_cast<double>(options.divisor_override.value_or(0)));
}

Tensor adaptive_avg_pool(const char* op, const Tensor& x, int axes, const PerAxis& size) {
  const Pooling pooling = adaptive_pooling(op, x, axes, size);
  if (x.is_contiguous() && std::ranges::all_of(pooling.windows.axes, [](const auto& axis) {
        return axis.out == 1;
      })) {  // one long window: reductions are faster
    Dims last;
    for (int i = 1; i <= axes; ++i) {
      last.push_back(-i);
    }
    return mean(x, last, true);
  }
  return avg_pool_of(x, pooling, false, 0);
}

Tensor lp_pool(const char* op, const Tensor& x, double p, int axes, const PerAxis& size, const LpPoolOptions& options) {
  check(std::isfinite(p) && p != 0, "{}: expected a finite p other than 0, got {}", op, p);
  const Pooling pooling =
      pooling_of(op, x, axes, {.size = size, .stride = options.stride, .ceil_mode = options.ceil_mode});
  const Tensor sum = avg_pool_of(pow(x, p), pooling, true, 0) * static_cast<double>(pooling.windows.taps());
  const Tensor is_zero = eq(sum, 0);
  return masked_fill(pow(masked_fill(sum, is_zero, 1), 1 / p), is_zero, 0);
}

Tensor max_unpool(const char* op, const Tensor& x, const Tensor& indices, int axes, const PerAxis& output_size) {
  images::check_images(op, x, axes);
  check(indices.dtype() == int64 && indices.shape() == x.shape(), "{}: expected indices of int64 {}, got {} {}", op,
        x.shape(), indices.dtype(), indices.shape());
  const Dims sizes = images::of_axes(op, "output_size", output_size, axes, 1);
  Shape planes = x.shape().slice(0, x.dim() - axes);
  Shape result = planes;
  for (const std::int64_t size : sizes) {
    result.push_back(size);
  }
  planes.push_back(-1);
  const Tensor positions = reshape(indices, planes);
  const Tensor values = reshape(x, planes);
  planes.back() = numel_of(sizes);
  const Tensor zero = zeros(planes, x.dtype(), x.device());
  const Tensor counts = scatter_add(zero, -1, positions, ones_like(values));
  return reshape(scatter_add(zero, -1, positions, values) / maximum(counts, 1), result);
}

}  // namespace

#define MICA_POOL(N)                                                                                   \
  Tensor max_pool##N##d(const Tensor& x, const PerAxis& size, const MaxPoolOptions& options) {         \
    return max_pool("max_pool" #N "d", x, N, size, options).values;                                    \
  }                                                                                                    \
  Tensor avg_pool##N##d(const Tensor& x, const PerAxis& size, const AvgPoolOptions& options) {         \
    return avg_pool("avg_pool" #N "d", x, N, size, options);                                           \
  }                                                                                                    \
  Tensor adaptive_avg_pool##N##d(const Tensor& x, const PerAxis& size) {                               \
    return adaptive_avg_pool("adaptive_avg_pool" #N "d", x, N, size);                                  \
  }                                                                                                    \
  Tensor adaptive_max_pool##N##d(const Tensor& x, const PerAxis& size) {                               \
    return max_pool_of(x, adaptive_pooling("adaptive_max_pool" #N "d", x, N, size), false).values;     \
  }                                                                                                    \
  Tensor lp_pool##N##d(const Tensor& x, double p, const PerAxis& size, const LpPoolOptions& options) { \
    return lp_pool("lp_pool" #N "d", x, p, N, size, options);                                          \
  }                                                                                                    \
  Tensor max_unpool##N##d(const Tensor& x, const Tensor& indices, const PerAxis& output_size) {        \
    return max_unpool("max_unpool" #N "d", x, indices, N, output_size);                                \
  }
MICA_POOL(1)
MICA_POOL(2)
MICA_POOL(3)
#undef MICA_POOL

MaxPoolResult max_pool_with_indices(const Tensor& x, int axes, const PerAxis& size, const MaxPoolOptions& options) {
  return max_pool("max_pool", x, axes, size, options, true);
}

MaxPoolResult adaptive_max_pool_with_indices(const Tensor& x, int axes, const PerAxis& size) {
  return max_pool_of(x, adaptive_pooling("adaptive_max_pool", x, axes, size), true);
}

}  // namespace mica

#include <mica/autograd/function.h>
#include <mica/core/copy.h>
#include <mica/ops/images/detail/image_grid.h>
#include <mica/ops/sample/detail/sample_kernels.h>
#include <mica/ops/sample/sample.h>
#include <mica/ops/view/view.h>

namespace mica {

namespace {

// Images → the columns of their windows or, transposed, columns → images.
struct Unfolding {
  static constexpr bool composed = true;
  kernels::PoolWindows windows;
  bool transposed = false;

  Tensor forward(autograd::Context&, const Tensor& from) const {
    const Tensor source = contiguous_data(from);
    const std::int64_t taps = windows.taps();
    const kernels::PoolAxis& height = windows.axes[1];
    const kernels::PoolAxis& width = windows.axes[2];
    const Shape shape = transposed ? Shape{from.size(0), from.size(1) / taps, height.in, width.in}
                                   : Shape{from.size(0), from.size(1) * taps, std::int64_t{height.out} * width.out};
    const Tensor to = empty(shape, from.dtype(), from.device());
    const kernels::Columns args{
        .windows = windows, .images = transposed ? to : source, .columns = transposed ? source : to};
    on_device(from.device(), [&](auto device) {
      transposed ? kernels::fold_columns(device, args) : kernels::unfold_images(device, args);
    });
    return to;
  }
  Tensor backward(autograd::Context&, const Tensor& dy) const {
    return autograd::apply(Unfolding{windows, !transposed}, dy);
  }
};

kernels::PoolWindows windows_of(const char* op, const Dims& image, const PerAxis& size, const UnfoldOptions& options) {
  const Dims sizes = images::of_axes(op, "size", size, 2, 1);
  const Dims dilation = images::of_axes(op, "dilation", options.dilation, 2, 1);
  const Dims padding = images::of_axes(op, "padding", options.padding, 2, 0);
  const Dims stride = images::of_axes(op, "stride", options.stride, 2, 1);
  kernels::PoolWindows windows;
  for (int i = 0; i < 2; ++i) {
    const std::int64_t padded = image[i] + 2 * padding[i];
    const std::int64_t reach = dilation[i] * (sizes[i] - 1) + 1;
    check(padded >= reach && padded + stride[i] <= INT32_MAX,
          "{}: expected images of at least the windows' size, got {} and windows of {}", op, image, sizes);
    windows.axes[1 + i] = {.in = static_cast<int>(image[i]),
                           .out = static_cast<int>((padded - reach) / stride[i] + 1),
                           .size = static_cast<int>(sizes[i]),
                           .stride = static_cast<int>(stride[i]),
                           .padding = static_cast<int>(padding[i]),
                           .dilation = static_cast<int>(dilation[i])};
  }
  return windows;
}

}  // namespace

Tensor unfold(const Tensor& x, const PerAxis& size, const UnfoldOptions& options) {
  images::check_images("unfold", x, 2);
  const kernels::PoolWindows windows = windows_of("unfold", x.shape().slice(x.dim() - 2), size, options);
  return images::with_batch(x, 2, [&](const Tensor& batch) { return autograd::apply(Unfolding{windows}, batch); });
}

Tensor fold(const Tensor& columns, const PerAxis& output_size, const PerAxis& size, const UnfoldOptions& options) {
  images::check_images("fold", columns, 1);
  const Dims image = images::of_axes("fold", "output_size", output_size, 2, 1);
  const kernels::PoolWindows windows = windows_of("fold", image, size, options);
  const std::int64_t count = std::int64_t{windows.axes[1].out} * windows.axes[2].out;
  check(columns.size(-2) % windows.taps() == 0 && columns.size(-1) == count,
        "fold: expected columns of shape (N, C · {}, {}), got {}", windows.taps(), count, columns.shape());
  return images::with_batch(columns, 1, [&](const Tensor& batch) {
    return autograd::apply(Unfolding{windows, true}, batch);
  });
}

Tensor pixel_shuffle(const Tensor& x, std::int64_t factor) {
  check(x.dim() >= 3 && factor >= 1 && x.size(-3) % (factor * factor) == 0,
        "pixel_shuffle: expected x of shape (…, C · {}, H, W), got {}", factor * factor, x.shape());
  const std::int64_t channels = x.size(-3) / (factor * factor), height = x.size(-2), width = x.size(-1);
  const Tensor parts = reshape(x, {numel_of(x.shape().slice(0, x.dim() - 3)), channels, factor, factor, height, width});
  Shape shape = x.shape().slice(0, x.dim() - 3);
  for (const std::int64_t length : {channels, height * factor, width * factor}) {
    shape.push_back(length);
  }
  return reshape(permute(parts, {0, 1, 4, 2, 5, 3}), shape);
}

Tensor pixel_unshuffle(const Tensor& x, std::int64_t factor) {
  check(x.dim() >= 3 && factor >= 1 && x.size(-2) % factor == 0 && x.size(-1) % factor == 0,
        "pixel_unshuffle: expected x of shape (…, C, H · {}, W · {}), got {}", factor, factor, x.shape());
  const std::int64_t channels = x.size(-3), height = x.size(-2) / factor, width = x.size(-1) / factor;
  const Tensor parts = reshape(x, {numel_of(x.shape().slice(0, x.dim() - 3)), channels, height, factor, width, factor});
  Shape shape = x.shape().slice(0, x.dim() - 3);
  for (const std::int64_t length : {channels * factor * factor, height, width}) {
    shape.push_back(length);
  }
  return reshape(permute(parts, {0, 1, 3, 5, 2, 4}), shape);
}

}  // namespace mica

#include <algorithm>

#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/ops/conv/detail/conv_kernels.h>
#include <mica/ops/inplace/detail/inplace_kernels.h>
#include <mica/ops/matmul/detail/matmul_steps.h>

namespace mica::kernels {

namespace {

constexpr std::int64_t kMostColumns = std::int64_t{1} << 25;  // elements of the windows that are copied at a time

// Elements in x that belong to a filter, for some images at a time:
//
//     x ──> padded with zeros ──> windows (N, C, R…, O…) ──> a matrix of columns, one for each element of y's axes
//
// Everything is computed in the accumulation type.
class Windows {
 public:
  explicit Windows(const ConvGeometry& geometry) : g_(geometry), n_(geometry.axes()) {
    channels_ = g_.x[1];
    for (int axis = 0; axis < n_; ++axis) {
      const std::int64_t reach = (output(axis) - 1) * g_.stride[axis] + (filter(axis) - 1) * g_.dilation[axis] + 1;
      padded_.push_back(std::max(reach, g_.padding[axis] + g_.x[2 + axis]));
      taps_ *= filter(axis);
      places_ *= output(axis);
    }
  }

  std::int64_t images_at_once() const {
    return std::clamp<std::int64_t>(kMostColumns / std::max<std::int64_t>(channels_ * taps_ * places_, 1), 1,
                                    std::max<std::int64_t>(g_.x[0], 1));
  }
  std::int64_t depth() const { return channels_ / g_.groups * taps_; }
  std::int64_t places() const { return places_; }

  Tensor new_padded(std::int64_t images, const Tensor& like) const {
    Shape shape{images, channels_};
    for (const std::int64_t length : padded_) {
      shape.push_back(length);
    }
    return zeros(shape, like.dtype(), like.device());
  }
  /// The part of a padded tensor that is x.
  Tensor inside(const Tensor& padded) const {
    Shape shape = g_.x;
    shape[0] = padded.shape()[0];
    std::int64_t offset = 0;
    for (int axis = 0; axis < n_; ++axis) {
      offset += g_.padding[axis] * padded.strides()[2 + axis];
    }
    return as_strided(padded, shape, padded.strides(), offset);
  }

  /// (N, C, R…, O…) or, with `images_last`, (C, R…, N, O…).
  Tensor view(const Tensor& padded, bool images_last) const {
    Shape shape{channels_};
    Strides strides{padded.strides()[1]};
    for (int axis = 0; axis < n_; ++axis) {
      shape.push_back(filter(axis));
      strides.push_back(padded.strides()[2 + axis] * g_.dilation[axis]);
    }
    const int images = images_last ? shape.size() : 0;
    for (int axis = 0; axis < n_; ++axis) {
      shape.push_back(output(axis));
      strides.push_back(padded.strides()[2 + axis] * g_.stride[axis]);
    }
    shape.insert(images, padded.shape()[0]);
    strides.insert(images, padded.strides()[0]);
    return as_strided(padded, shape, strides, 0);
  }

  /// Adds columns (N, C, R…, O…) to the padded elements that they belong to, one filter tap after the other, since
  /// windows overlap.
  void add_to(const Tensor& padded, const Tensor& columns) const {
    const Tensor windows = view(padded, false);
    for (std::int64_t tap = 0; tap < taps_; ++tap) {
      add_into(at_tap(windows, tap), at_tap(columns, tap));
    }
  }

 private:
  std::int64_t filter(int axis) const { return g_.weight[2 + axis]; }
  std::int64_t output(int axis) const { return g_.y[2 + axis]; }

  // (N, C, O…) at one tap of windows (N, C, R…, O…).
  Tensor at_tap(const Tensor& windows, std::int64_t tap) const {
    std::int64_t offset = 0;
    for (int axis = n_ - 1; axis >= 0; --axis) {
      offset += tap % filter(axis) * windows.strides()[2 + axis];
      tap /= filter(axis);
    }
    Shape shape = windows.shape();
    Strides strides = windows.strides();
    for (int axis = 0; axis < n_; ++axis) {
      shape.erase(2);
      strides.erase(2);
    }
    return as_strided(windows, shape, strides, offset);
  }

  const ConvGeometry& g_;
  int n_;
  std::int64_t channels_;
  Dims padded_;  // lengths of the spatial axes
  std::int64_t taps_ = 1;
  std::int64_t places_ = 1;
};

Tensor matrices(const Tensor& dense, const Shape& shape) {
  return as_strided(dense, shape, contiguous_strides(shape), dense.handle()->offset);
}

Tensor last_axes_swapped(const Tensor& x) {
  Shape shape = x.shape();
  Strides strides = x.strides();
  std::swap(shape[x.dim() - 2], shape[x.dim() - 1]);
  std::swap(strides[x.dim() - 2], strides[x.dim() - 1]);
  return as_strided(x, shape, strides, x.handle()->offset);
}

Tensor images(const Tensor& x, std::int64_t first, std::int64_t count) {
  Shape shape = x.shape();
  shape[0] = count;
  return as_strided(x, shape, x.strides(), x.handle()->offset + first * x.strides()[0]);
}

// A row-major copy in `dtype`, or x itself if it is one.
Tensor dense_as(const Tensor& x, DType dtype) {
  if (x.dtype() == dtype) {
    return contiguous_data(x);
  }
  const Tensor copy = empty(x.shape(), dtype, x.device());
  copy_into(copy, x);
  return copy;
}

}  // namespace

void end_convolution(const Convolution& args, const Tensor& out) {
  on_device(out.device(), [&](auto device) {
    if (args.bias.defined()) {
      Shape shape = Shape::filled(out.dim() - 1, 1);
      shape[0] = out.shape()[1];
      add_in_place(device, out, matrices(dense_as(args.bias, out.dtype()), shape), 1);
    }
    activate(device, args.activation, out, out);
  });
}

void composed_convolve(const Convolution& args) {
  const ConvGeometry& g = args.geometry;
  const Windows windows(g);
  const Tensor& out = args.out();
  const DType wide = accumulate_dtype(out.dtype());
  const std::int64_t groups = g.groups, rows = g.weight[0] / groups, depth = windows.depth();
  const std::int64_t places = windows.places();
  const Shape weight_shape{groups, rows, depth};
  const Tensor weight = args.result == ConvPart::weight ? zeros(weight_shape, wide, out.device())
                                                        : matrices(dense_as(args.weight, wide), weight_shape);
  for (std::int64_t first = 0; first < g.x[0]; first += windows.images_at_once()) {
    const std::int64_t count = std::min(windows.images_at_once(), g.x[0] - first);
    const Tensor padded = windows.new_padded(count, weight);
    const auto y_images = [&] { return images(args.y, first, count); };
    if (args.result != ConvPart::x) {
      copy_into(windows.inside(padded), images(args.x, first, count));
    }
    if (args.result == ConvPart::y) {
      const Tensor columns = matrices(contiguous_data(windows.view(padded, false)), {count, groups, depth, places});
      const Tensor sums = empty({count, groups, rows, places}, wide, out.device());
      mica::detail::multiply({.a = weight, .b = columns, .bias = {}, .out = sums});
      const Tensor y = matrices(sums, y_images().shape());
      end_convolution(args, y);
      copy_into(y_images(), y);
    } else if (args.result == ConvPart::x) {
      const Tensor columns = empty(windows.view(padded, false).shape(), wide, out.device());
      mica::detail::multiply({.a = last_axes_swapped(weight),
                              .b = matrices(dense_as(y_images(), wide), {count, groups, rows, places}),
                              .bias = {},
                              .out = matrices(columns, {count, groups, depth, places})});
      windows.add_to(padded, columns);
      const Tensor x = contiguous_data(windows.inside(padded));
      end_convolution(args, x);
      copy_into(images(args.x, first, count), x);
    } else {
      const Tensor columns = matrices(contiguous_data(windows.view(padded, true)), {groups, depth, count * places});
      Shape shape = y_images().shape();
      Strides strides = y_images().strides();
      std::swap(shape[0], shape[1]);
      std::swap(strides[0], strides[1]);
      const Tensor y = dense_as(as_strided(args.y, shape, strides, y_images().handle()->offset), wide);
      const Tensor sums = empty(weight_shape, wide, out.device());
      mica::detail::multiply(
          {.a = matrices(y, {groups, rows, count * places}), .b = last_axes_swapped(columns), .bias = {}, .out = sums});
      add_into(weight, sums);
    }
  }
  if (args.result == ConvPart::weight) {
    copy_into(out, matrices(weight, g.weight));
  }
}

}  // namespace mica::kernels

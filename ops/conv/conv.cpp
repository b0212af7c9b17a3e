#include <algorithm>
#include <cstdint>
#include <vector>

#include <mica/autograd/autocast.h>
#include <mica/autograd/function.h>
#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/ops/conv/conv.h>
#include <mica/ops/conv/detail/conv_kernels.h>
#include <mica/ops/elementwise/detail/unary_gradient.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/index/index.h>
#include <mica/ops/matmul/detail/matmul_kernels.h>
#include <mica/ops/reduce/sum.h>
#include <mica/ops/view/channels_last.h>
#include <mica/ops/view/view.h>

namespace mica {

namespace {

using kernels::ConvGeometry;
using kernels::ConvPart;

constexpr const char* kConvNames[] = {"conv1d", "conv2d", "conv3d"};
constexpr const char* kTransposeNames[] = {"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"};

// Images on a GPU are channels last, for cuDNN's fastest kernels.
Tensor new_images(const Shape& shape, const Tensor& like) {
  const bool images = like.device().is_cuda() && shape.size() >= 4;
  return images ? empty_channels_last(shape, like.dtype(), like.device()) : empty(shape, like.dtype(), like.device());
}

// The sum over all axes but the channels.
Tensor sum_by_channel(const Tensor& dy) {
  if (dy.dim() >= 4 && is_channels_last(dy)) {
    Dims order{0};
    for (int axis = 2; axis < dy.dim(); ++axis) {
      order.push_back(axis);
    }
    order.push_back(1);
    return sum(reshape(permute(dy, order), {-1, dy.size(1)}), {0});
  }
  Dims axes{0};
  for (int axis = 2; axis < dy.dim(); ++axis) {
    axes.push_back(axis);
  }
  return sum(dy, axes);
}

// One of the products of kernels::Convolution. It is linear in each of its two tensors, so the gradient by one of them
// is the product for that part, of the other tensor and the result's gradient.
struct Conv {
  static constexpr bool composed = true;
  ConvGeometry geometry;
  ConvPart result;
  Activation activation = Activation::none;

  // a and b are the parts that are not the result, in the order x or y, weight or y.
  Tensor forward(autograd::Context& ctx, const Tensor& a, const Tensor& b, const Tensor& bias) const {
    kernels::Convolution args{.geometry = geometry, .result = result, .x = {}, .weight = {}, .y = {}};
    Tensor out;
    if (result == ConvPart::y) {
      out = new_images(geometry.y, a);
      args.x = a, args.weight = b, args.y = out;
    } else if (result == ConvPart::x) {
      out = new_images(geometry.x, a);
      args.y = a, args.weight = b, args.x = out;
    } else {
      out = new_images(geometry.weight, a);
      args.x = a, args.y = b, args.weight = out;
    }
    args.bias = bias.defined() ? contiguous_data(bias) : bias;
    args.activation = activation;
    if (out.numel() > 0) {
      on_device(out.device(), [&](auto device) { kernels::convolve(device, args); });
    }
    ctx.save_for_backward(ctx.needs_grad(1) ? a : Tensor{}, ctx.needs_grad(0) ? b : Tensor{},
                          activation != Activation::none ? out : Tensor{});
    return out;
  }

  Tensors backward(autograd::Context& ctx, const Tensor& dout) const {
    const auto [a, b, saved] = ctx.saved<3>();
    const Tensor dz =
        activation == Activation::none ? dout : detail::unary_gradient(kernels::function_of(activation), dout, saved);
    const auto product = [&](ConvPart part, const Tensor& first, const Tensor& second) {
      return autograd::apply(Conv{geometry, part}, first, second, Tensor{});
    };
    Tensors gradients(3);
    if (ctx.needs_grad(0)) {
      gradients[0] = result == ConvPart::y   ? product(ConvPart::x, dz, b)
                     : result == ConvPart::x ? product(ConvPart::y, dz, b)
                                             : product(ConvPart::x, b, dz);
    }
    if (ctx.needs_grad(1)) {
      gradients[1] = result == ConvPart::y   ? product(ConvPart::weight, a, dz)
                     : result == ConvPart::x ? product(ConvPart::weight, dz, a)
                                             : product(ConvPart::y, a, dz);
    }
    if (ctx.needs_grad(2)) {
      gradients[2] = sum_by_channel(dz);
    }
    return gradients;
  }
};

// The activations whose derivative is a function of their result are part of the op; others are an op of their own.
Tensor run(const ConvGeometry& geometry, ConvPart result, const Tensor& x, const Tensor& weight, const Tensor& bias,
           Activation activation) {
  // On a GPU, copies that change the layout are ops of their own, so that backward uses them again.
  if (x.device().is_cuda() && x.dim() >= 4 && !(is_channels_last(x) && is_channels_last(weight))) {
    return run(geometry, result, channels_last(x), channels_last(weight), bias, activation);
  }
  const bool fused = activation == Activation::none || kernels::has_slope_from_output(activation);
  const Tensor y = autograd::apply(Conv{geometry, result, fused ? activation : Activation::none}, x, weight, bias);
  switch (fused ? Activation::none : activation) {
    case Activation::gelu: return gelu(y);
    case Activation::gelu_tanh: return gelu(y, GeluApproximation::tanh);
    default: return y;
  }
}

// One number for each of n axes.
Dims spread(const char* op, const char* what, const Dims& given, int n, std::int64_t least) {
  check(given.size() == 1 || given.size() == n, "{}: expected {} for each of {} axes, or one number, got {}", op, what,
        n, given);
  const Dims values = given.size() == n ? given : Dims::filled(n, given[0]);
  for (const std::int64_t value : values) {
    check(value >= least, "{}: expected {} of at least {}, got {}", op, what, least, given);
    check(value <= INT32_MAX, "{}: expected {} below 2^31, got {}", op, what, given);
  }
  return values;
}

// Checks all that convolutions and their transposes have in common.
void check_operands(const char* op, int n, const Tensor& x, const Tensor& weight, const Tensor& bias,
                    std::int64_t groups, Activation activation, bool transpose) {
  check(x.dim() == n + 1 || x.dim() == n + 2,
        "{}: expected x of {} axes (N, C and {} spatial ones) or without N, got {}", op, n + 2, n, x.shape());
  check(weight.dim() == n + 2, "{}: expected a weight of {} axes, got shape {}", op, n + 2, weight.shape());
  check(is_floating(x.dtype()) && weight.dtype() == x.dtype(),
        "{}: expected x and weight of one floating dtype, got {} and {}", op, x.dtype(), weight.dtype());
  check(weight.device() == x.device(), "{}: expected weight on {}, got {}", op, x.device(), weight.device());
  check(groups >= 1, "{}: expected at least one group, got {}", op, groups);
  check(activation <= Activation::gelu_tanh, "{}: expected one of the enumerators of Activation, got {}", op,
        static_cast<int>(activation));
  const std::int64_t channels = x.size(-n - 1);
  const std::int64_t first = weight.size(0), second = weight.size(1);
  if (transpose) {
    check(first == channels, "{}: expected a weight (C, K / groups, …) for {} channels, got shape {}", op, channels,
          weight.shape());
  } else {
    check(second <= INT64_MAX / groups && second * groups == channels,
          "{}: expected a weight (K, C / groups, …) for {} channels in {} groups, got shape {}", op, channels, groups,
          weight.shape());
  }
  check(first % groups == 0 && channels % groups == 0,
        "{}: expected numbers of channels that {} groups divide, got {} and {}", op, groups, channels,
        transpose ? second * groups : first);
  for (int axis = 0; axis < n; ++axis) {
    check(weight.size(2 + axis) >= 1, "{}: expected filters of at least one element, got shape {}", op, weight.shape());
    check(weight.size(2 + axis) <= INT32_MAX && x.size(axis - n) <= INT32_MAX,
          "{}: expected lengths below 2^31, got shapes {} and {}", op, x.shape(), weight.shape());
  }
  if (bias.defined()) {
    const std::int64_t results = transpose ? second * groups : first;
    check(bias.shape() == Shape{results}, "{}: expected bias of shape [{}], got {}", op, results, bias.shape());
    check(bias.dtype() == x.dtype() && bias.device() == x.device(), "{}: expected bias of {} on {}, got {} on {}", op,
          x.dtype(), x.device(), bias.dtype(), bias.device());
  }
}

// The positions in an axis of `length` elements of the padded axis's elements.
Tensor padded_positions(PaddingMode mode, std::int64_t length, std::int64_t before, std::int64_t after, Device device) {
  std::vector<std::int64_t> positions;
  for (std::int64_t i = -before; i < length + after; ++i) {
    std::int64_t at = std::clamp<std::int64_t>(i, 0, length - 1);
    if (mode == PaddingMode::reflect) {
      at = i < 0 ? -i : i >= length ? 2 * (length - 1) - i : i;
    } else if (mode == PaddingMode::circular) {
      at = (i + length) % length;
    }
    positions.push_back(at);
  }
  const auto count = static_cast<std::int64_t>(positions.size());
  return from_data(positions, {count}, device);
}

Tensor padded(const char* op, const Tensor& x, PaddingMode mode, const Dims& before, const Dims& after) {
  Tensor result = x;
  for (int axis = 0; axis < before.size(); ++axis) {
    const std::int64_t length = x.size(2 + axis), most = std::max(before[axis], after[axis]);
    if (most == 0) {
      continue;
    }
    check(mode != PaddingMode::reflect || most < length, "{}: expected a padding by reflection below {}, got {}", op,
          length, most);
    check(mode != PaddingMode::circular || most <= length, "{}: expected a circular padding of at most {}, got {}", op,
          length, most);
    check(length > 0, "{}: expected elements to pad with, got shape {}", op, x.shape());
    result = index_select(result, 2 + axis, padded_positions(mode, length, before[axis], after[axis], x.device()));
  }
  return result;
}

Tensor convolution(int n, const Tensor& x, const Tensor& weight, const Tensor& bias, const ConvOptions& options) {
  const char* const op = kConvNames[n - 1];
  if (autograd::autocast_narrows(x, weight, bias)) {
    return convolution(n, autograd::narrowed(x), autograd::narrowed(weight), autograd::narrowed(bias), options);
  }
  check_operands(op, n, x, weight, bias, options.groups, options.activation, false);
  check(options.padding_mode <= PaddingMode::circular, "{}: expected one of the enumerators of PaddingMode, got {}", op,
        static_cast<int>(options.padding_mode));
  if (x.dim() == n + 1) {
    return squeeze(convolution(n, unsqueeze(x, 0), weight, bias, options), 0);
  }
  const Dims stride = spread(op, "a stride", options.stride, n, 1);
  const Dims dilation = spread(op, "a dilation", options.dilation, n, 1);
  Dims before = spread(op, "a padding", options.padding.sizes, n, 0);
  Dims after = before;
  Shape shape{x.size(0), weight.size(0)};
  for (int axis = 0; axis < n; ++axis) {
    const std::int64_t reach = dilation[axis] * (weight.size(2 + axis) - 1);
    if (options.padding.same) {
      check(stride[axis] == 1, "{}: expected a stride of 1 with the padding \"same\", got {}", op, stride);
      before[axis] = reach / 2;
      after[axis] = reach - before[axis];
    }
    const std::int64_t length = x.size(2 + axis) + before[axis] + after[axis];
    check(length > reach, "{}: expected a padded input of at least {} elements along spatial axis {}, got {}", op,
          reach + 1, axis, length);
    shape.push_back((length - reach - 1) / stride[axis] + 1);
  }
  Tensor input = x;
  if (options.padding_mode != PaddingMode::zeros) {
    input = padded(op, x, options.padding_mode, before, after);
    before = Dims::filled(n, 0);
  }
  return run({.x = input.shape(),
              .weight = weight.shape(),
              .y = shape,
              .stride = stride,
              .dilation = dilation,
              .padding = before,
              .groups = options.groups},
             ConvPart::y, input, weight, bias, options.activation);
}

Tensor transposed_convolution(int n, const Tensor& x, const Tensor& weight, const Tensor& bias,
                              const ConvTransposeOptions& options) {
  const char* const op = kTransposeNames[n - 1];
  if (autograd::autocast_narrows(x, weight, bias)) {
    return transposed_convolution(n, autograd::narrowed(x), autograd::narrowed(weight), autograd::narrowed(bias),
                                  options);
  }
  check_operands(op, n, x, weight, bias, options.groups, options.activation, true);
  if (x.dim() == n + 1) {
    return squeeze(transposed_convolution(n, unsqueeze(x, 0), weight, bias, options), 0);
  }
  const Dims stride = spread(op, "a stride", options.stride, n, 1);
  const Dims dilation = spread(op, "a dilation", options.dilation, n, 1);
  const Dims padding = spread(op, "a padding", options.padding, n, 0);
  const Dims more = spread(op, "an output padding", options.output_padding, n, 0);
  Shape shape{x.size(0), weight.size(1) * options.groups};
  for (int axis = 0; axis < n; ++axis) {
    check(more[axis] < std::max(stride[axis], dilation[axis]),
          "{}: expected an output padding less than stride or dilation, got {} for {} and {}", op, more, stride,
          dilation);
    const std::int64_t length = (x.size(2 + axis) - 1) * stride[axis] - 2 * padding[axis] +
                                dilation[axis] * (weight.size(2 + axis) - 1) + more[axis] + 1;
    check(x.size(2 + axis) >= 1 && length >= 1,
          "{}: expected an output with elements, got length {} for spatial axis {}", op, length, axis);
    shape.push_back(length);
  }
  return run({.x = shape,
              .weight = weight.shape(),
              .y = x.shape(),
              .stride = stride,
              .dilation = dilation,
              .padding = padding,
              .groups = options.groups},
             ConvPart::x, x, weight, bias, options.activation);
}

}  // namespace

ConvPadding::ConvPadding(std::string_view name) : same(name == "same") {
  check(same || name == "valid", "conv: expected a padding of numbers, \"same\" or \"valid\", got \"{}\"", name);
}

Tensor conv1d(const Tensor& x, const Tensor& weight, const Tensor& bias, const ConvOptions& options) {
  return convolution(1, x, weight, bias, options);
}
Tensor conv2d(const Tensor& x, const Tensor& weight, const Tensor& bias, const ConvOptions& options) {
  return convolution(2, x, weight, bias, options);
}
Tensor conv3d(const Tensor& x, const Tensor& weight, const Tensor& bias, const ConvOptions& options) {
  return convolution(3, x, weight, bias, options);
}
Tensor conv_transpose1d(const Tensor& x, const Tensor& weight, const Tensor& bias,
                        const ConvTransposeOptions& options) {
  return transposed_convolution(1, x, weight, bias, options);
}
Tensor conv_transpose2d(const Tensor& x, const Tensor& weight, const Tensor& bias,
                        const ConvTransposeOptions& options) {
  return transposed_convolution(2, x, weight, bias, options);
}
Tensor conv_transpose3d(const Tensor& x, const Tensor& weight, const Tensor& bias,
                        const ConvTransposeOptions& options) {
  return transposed_convolution(3, x, weight, bias, options);
}

}  // namespace mica

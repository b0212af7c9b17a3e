#include <cmath>

#include <mica/core/creation.h>
#include <mica/nn/conv.h>
#include <mica/nn/init.h>

namespace mica::nn {

namespace {

mica::ConvOptions op_options(const ConvOptions& o, Activation activation) {
  return {.stride = o.stride,
          .padding = o.padding,
          .dilation = o.dilation,
          .groups = o.groups,
          .padding_mode = o.padding_mode,
          .activation = activation};
}

mica::ConvTransposeOptions op_options(const ConvTransposeOptions& o, Activation activation) {
  return {.stride = o.stride,
          .padding = o.padding,
          .output_padding = o.output_padding,
          .dilation = o.dilation,
          .groups = o.groups,
          .activation = activation};
}

}  // namespace

namespace detail {

ConvParameters::ConvParameters(const char* name, int axes, std::int64_t in, std::int64_t out, const PerAxis& kernel,
                               std::int64_t groups, bool has_bias, bool transpose) {
  check(in >= 1 && out >= 1, "{}: expected in >= 1 and out >= 1, got {} and {}", name, in, out);
  check(groups >= 1 && in % groups == 0 && out % groups == 0, "{}: expected groups that divide {} and {}, got {}", name,
        in, out, groups);
  const Dims& lengths = kernel;
  check(lengths.size() == 1 || lengths.size() == axes,
        "{}: expected a kernel length for each of {} axes, or one number, got {}", name, axes, lengths);
  Shape shape = transpose ? Shape{in, out / groups} : Shape{out, in / groups};
  for (int axis = 0; axis < axes; ++axis) {
    const std::int64_t length = lengths.size() == 1 ? lengths[0] : lengths[axis];
    check(length >= 1, "{}: expected kernel lengths of at least 1, got {}", name, lengths);
    shape.push_back(length);
  }
  const double bound = 1 / std::sqrt(static_cast<double>(numel_of(shape.slice(1))));
  weight = param("weight", init::uniform_(empty(shape), -bound, bound));
  if (has_bias) {
    bias = param("bias", init::uniform_(empty({out}), -bound, bound));
  }
}

}  // namespace detail

Conv1d::Conv1d(std::int64_t in, std::int64_t out, const PerAxis& kernel, const ConvOptions& options)
    : ConvParameters("Conv1d", 1, in, out, kernel, options.groups, options.bias, false), options_(options) {}

Tensor Conv1d::operator()(const Tensor& x, Activation activation) const {
  return call(*this, x, [&](const Tensor& x) { return conv1d(x, weight, bias, op_options(options_, activation)); });
}

Conv2d::Conv2d(std::int64_t in, std::int64_t out, const PerAxis& kernel, const ConvOptions& options)
    : ConvParameters("Conv2d", 2, in, out, kernel, options.groups, options.bias, false), options_(options) {}

Tensor Conv2d::operator()(const Tensor& x, Activation activation) const {
  return call(*this, x, [&](const Tensor& x) { return conv2d(x, weight, bias, op_options(options_, activation)); });
}

Conv3d::Conv3d(std::int64_t in, std::int64_t out, const PerAxis& kernel, const ConvOptions& options)
    : ConvParameters("Conv3d", 3, in, out, kernel, options.groups, options.bias, false), options_(options) {}

Tensor Conv3d::operator()(const Tensor& x, Activation activation) const {
  return call(*this, x, [&](const Tensor& x) { return conv3d(x, weight, bias, op_options(options_, activation)); });
}

ConvTranspose1d::ConvTranspose1d(std::int64_t in, std::int64_t out, const PerAxis& kernel,
                                 const ConvTransposeOptions& options)
    : ConvParameters("ConvTranspose1d", 1, in, out, kernel, options.groups, options.bias, true), options_(options) {}

Tensor ConvTranspose1d::operator()(const Tensor& x, Activation activation) const {
  return call(*this, x,
              [&](const Tensor& x) { return conv_transpose1d(x, weight, bias, op_options(options_, activation)); });
}

ConvTranspose2d::ConvTranspose2d(std::int64_t in, std::int64_t out, const PerAxis& kernel,
                                 const ConvTransposeOptions& options)
    : ConvParameters("ConvTranspose2d", 2, in, out, kernel, options.groups, options.bias, true), options_(options) {}

Tensor ConvTranspose2d::operator()(const Tensor& x, Activation activation) const {
  return call(*this, x,
              [&](const Tensor& x) { return conv_transpose2d(x, weight, bias, op_options(options_, activation)); });
}

ConvTranspose3d::ConvTranspose3d(std::int64_t in, std::int64_t out, const PerAxis& kernel,
                                 const ConvTransposeOptions& options)
    : ConvParameters("ConvTranspose3d", 3, in, out, kernel, options.groups, options.bias, true), options_(options) {}

Tensor ConvTranspose3d::operator()(const Tensor& x, Activation activation) const {
  return call(*this, x,
              [&](const Tensor& x) { return conv_transpose3d(x, weight, bias, op_options(options_, activation)); });
}

}  // namespace mica::nn

#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string_view>

#include <mica/core/per_axis.h>
#include <mica/core/tensor.h>
#include <mica/ops/matmul/matmul.h>

namespace mica {

/// The elements that are added at both ends of each spatial axis: numbers, "valid" (0), or "same", for an output of the
/// input's size. With "same", an odd number of elements is divided so that the end gets one more.
struct ConvPadding {
  PerAxis sizes = 0;
  bool same = false;

  template <std::integral I>
  ConvPadding(I all) : sizes(all) {}
  ConvPadding(std::initializer_list<std::int64_t> values) : sizes(values) {}
  ConvPadding(const Dims& values) : sizes(values) {}
  /// Throws Error unless `name` is "same" or "valid".
  ConvPadding(std::string_view name);
  template <std::size_t kLength>
  ConvPadding(const char (&name)[kLength]) : ConvPadding(std::string_view(name)) {}
};

/// The values of the added elements: 0; the input mirrored at its ends, without repeating the end itself; the end; or
/// the input from its other end.
enum class PaddingMode { zeros, reflect, replicate, circular };

struct ConvOptions {
  PerAxis stride = 1;
  ConvPadding padding = 0;
  PerAxis dilation = 1;     ///< the distance between elements that a filter multiplies
  std::int64_t groups = 1;  ///< channels are divided into this many groups, each with its own filters
  PaddingMode padding_mode = PaddingMode::zeros;
  Activation activation = Activation::none;  ///< applied to the result
};

/// A convolution, as deep learning calls it (a cross-correlation): y = f(bias + weight ⋆ x). For two spatial axes,
///
///   y[n, k, i, j] = f(bias[k] + Σ_{c, r, s} weight[k, c, r, s] · x[n, c, i·stride + r·dilation − padding, …])
///
/// @param x       (N, C, spatial axes…), or without N; floating. conv1d has one spatial axis, conv2d two, conv3d three.
/// @param weight  (K, C / groups, filter axes…), of x's dtype and device. Filters k of group g read its channels.
/// @param bias    (K), or undefined: none.
/// @return (N, K, spatial axes…), of lengths ⌊(length + 2·padding − dilation·(filter − 1) − 1) / stride⌋ + 1.
///
/// Sums are in float32 for 16-bit floats and rounded once; on CUDA, the bias may be added after that. Autocast computes
/// in 16 bits. Differentiable any number of times. Results repeat their bits, unless MatmulTuning::timed chooses
/// another engine in another run.
///
/// On CUDA, cuDNN computes it, with the settings of set_float32_matmul_precision() and set_matmul_tuning(). Results
/// with two or three spatial axes are channels last (core/channels_last.h), and such inputs are not copied. Without
/// cuDNN, and for float64, windows of the input are copied and multiplied by matmul().
///
/// Throws Error before anything is computed if a shape, dtype, device or option does not match; if the padded input is
/// smaller than a filter; for "same" with a stride other than 1; or if `reflect` or `circular` would need more elements
/// than the input has.
Tensor conv1d(const Tensor& x, const Tensor& weight, const Tensor& bias = {}, const ConvOptions& options = {});
Tensor conv2d(const Tensor& x, const Tensor& weight, const Tensor& bias = {}, const ConvOptions& options = {});
Tensor conv3d(const Tensor& x, const Tensor& weight, const Tensor& bias = {}, const ConvOptions& options = {});

struct ConvTransposeOptions {
  PerAxis stride = 1;
  PerAxis padding = 0;         ///< the padding of the convolution whose transpose this is
  PerAxis output_padding = 0;  ///< added to the output's lengths; less than stride or dilation
  PerAxis dilation = 1;
  std::int64_t groups = 1;
  Activation activation = Activation::none;
};

/// The transpose of a convolution, which maps y to x's shape: the gradient of conv1d, conv2d or conv3d with respect to
/// its input, plus a bias, as in PyTorch.
///
/// @param x       (N, C, spatial axes…), or without N; floating.
/// @param weight  (C, K / groups, filter axes…), of x's dtype and device.
/// @param bias    (K), or undefined: none.
/// @return (N, K, spatial axes…), of lengths (length − 1)·stride − 2·padding + dilation·(filter − 1) + output_padding
/// + 1.
///
/// Precision, layout, gradients and errors are those of the convolutions.
Tensor conv_transpose1d(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
                        const ConvTransposeOptions& options = {});
Tensor conv_transpose2d(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
                        const ConvTransposeOptions& options = {});
Tensor conv_transpose3d(const Tensor& x, const Tensor& weight, const Tensor& bias = {},
                        const ConvTransposeOptions& options = {});

}  // namespace mica

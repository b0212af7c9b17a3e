#pragma once

#include <cstdint>

#include <mica/nn/module.h>
#include <mica/ops/conv/conv.h>

namespace mica::nn {

/// The options of mica::ConvOptions, and whether there is a bias.
struct ConvOptions {
  PerAxis stride = 1;
  ConvPadding padding = 0;
  PerAxis dilation = 1;
  std::int64_t groups = 1;
  bool bias = true;
  PaddingMode padding_mode = PaddingMode::zeros;
};

/// The options of mica::ConvTransposeOptions, and whether there is a bias.
struct ConvTransposeOptions {
  PerAxis stride = 1;
  PerAxis padding = 0;
  PerAxis output_padding = 0;
  std::int64_t groups = 1;
  bool bias = true;
  PerAxis dilation = 1;
};

namespace detail {

/// What all layers below have in common: the parameters.
class ConvParameters : public Module {
 public:
  Tensor weight;
  Tensor bias;  // undefined without one

 protected:
  /// Throws unless in, out and the kernel's lengths are at least 1 and `groups` divides in and out.
  ConvParameters(const char* name, int axes, std::int64_t in, std::int64_t out, const PerAxis& kernel,
                 std::int64_t groups, bool has_bias, bool transpose);
};

}  // namespace detail

// Convolutions with parameters of PyTorch's names and shapes: weight (out, in / groups, kernel…), for transposes (in,
// out / groups, kernel…), and bias (out). Both are initialized uniformly in ±1/√(weight.size(1) · kernel elements), as
// in PyTorch. `activation` is applied to the result, fused where possible: conv(x, Activation::relu). Options, shapes
// and errors are those of mica::conv2d and mica::conv_transpose2d.

class Conv1d : public detail::ConvParameters {
 public:
  Conv1d(std::int64_t in, std::int64_t out, const PerAxis& kernel, const ConvOptions& options = {});
  Tensor operator()(const Tensor& x, Activation activation = Activation::none) const;

 private:
  ConvOptions options_;
};

class Conv2d : public detail::ConvParameters {
 public:
  Conv2d(std::int64_t in, std::int64_t out, const PerAxis& kernel, const ConvOptions& options = {});
  Tensor operator()(const Tensor& x, Activation activation = Activation::none) const;

 private:
  ConvOptions options_;
};

class Conv3d : public detail::ConvParameters {
 public:
  Conv3d(std::int64_t in, std::int64_t out, const PerAxis& kernel, const ConvOptions& options = {});
  Tensor operator()(const Tensor& x, Activation activation = Activation::none) const;

 private:
  ConvOptions options_;
};

class ConvTranspose1d : public detail::ConvParameters {
 public:
  ConvTranspose1d(std::int64_t in, std::int64_t out, const PerAxis& kernel, const ConvTransposeOptions& options = {});
  Tensor operator()(const Tensor& x, Activation activation = Activation::none) const;

 private:
  ConvTransposeOptions options_;
};

class ConvTranspose2d : public detail::ConvParameters {
 public:
  ConvTranspose2d(std::int64_t in, std::int64_t out, const PerAxis& kernel, const ConvTransposeOptions& options = {});
  Tensor operator()(const Tensor& x, Activation activation = Activation::none) const;

 private:
  ConvTransposeOptions options_;
};

class ConvTranspose3d : public detail::ConvParameters {
 public:
  ConvTranspose3d(std::int64_t in, std::int64_t out, const PerAxis& kernel, const ConvTransposeOptions& options = {});
  Tensor operator()(const Tensor& x, Activation activation = Activation::none) const;

 private:
  ConvTransposeOptions options_;
};

}  // namespace mica::nn

#pragma once

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>
#include <mica/ops/matmul/matmul.h>

namespace mica::kernels {

/// Three tensors x (N, C, I…), weight (K, C / groups, R…) and y (N, K, O…) with one to three spatial axes, and which
/// elements of them belong together: those where, along each axis, i = o · stride + r · dilation − padding.
struct ConvGeometry {
  Shape x, weight, y;
  Dims stride, dilation;
  Dims padding;  // before the first element; the one after the last follows from y's lengths
  std::int64_t groups = 1;

  int axes() const { return stride.size(); }
};

enum class ConvPart { x, weight, y };

/// One of three products, each of which is the sum over all pairs of the other two tensors' elements that belong
/// together with an element of the result:
///
///   y       the convolution
///   x       the transposed convolution: the gradient of the convolution by x
///   weight  the gradient of the convolution by its weight
///
/// All tensors have the same floating dtype; the result is not empty. The result for y or x is then f(product + bias).
struct Convolution {
  ConvGeometry geometry;
  ConvPart result;
  Tensor x, weight, y;                       // two are inputs with any strides; the result is dense
  Tensor bias{};                             // (K) or (C), contiguous, or undefined
  Activation activation = Activation::none;  // f: none, relu or leaky_relu

  const Tensor& out() const { return result == ConvPart::y ? y : result == ConvPart::x ? x : weight; }
};

void convolve(Cpu, const Convolution& args);
void convolve(Cuda, const Convolution& args);

/// By copies of windows, matrix products and sums of existing kernels, for any device and floating dtype.
void composed_convolve(const Convolution& args);

/// out = f(out + bias), for the result `out` of a product that has done neither.
void end_convolution(const Convolution& args, const Tensor& out);

/// By cuDNN. False, and nothing is written, if it has no kernel that repeats its bits.
bool cudnn_convolve(Cuda, const Convolution& args);

}  // namespace mica::kernels

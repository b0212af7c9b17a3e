#pragma once

// What normalizations of rows share on the host: layer_norm, rms_norm and, but for derivatives, add_layer_norm.

#include <cstdint>
#include <functional>

#include <mica/autograd/function.h>
#include <mica/core/tensor.h>

namespace mica::norm {

/// x with its elements in row-major order; undefined if x is.
Tensor contiguous_or_absent(const Tensor& x);

/// Throws Error in the name of `op` unless x is floating and of a shape that ends in normalized_shape, of at least one
/// axis. Returns how many axes precede it.
int check_normalized(const char* op, const Tensor& x, const Shape& normalized_shape);

/// Throws Error in the name of `op` unless the parameter `name`, if it is defined, is of normalized_shape, on x's
/// device, and of x's dtype or that of its sums.
void check_parameter(const char* op, const char* name, const Tensor& parameter, const Tensor& x,
                     const Shape& normalized_shape);

/// What is the norm's own in its second derivative, by recorded ops on matrices (rows, columns) of x's sums.
struct Normalization {
  std::function<Tensor(const Tensor& x)> normalize;                 // x̂
  std::function<Tensor(const Tensor& v, const Tensor& x)> project;  // R(v): the kernel for dx without a weight
  std::function<Tensor(const Tensor& x)> rstd;                      // (rows, 1)
};

/// Gradients with respect to these, in their shapes and dtypes; undefined: none, or not wanted.
struct Gradients {
  Tensor dy;
  Tensor x;
  Tensor weight;
};

/// The backward of a norm's own backward, (dy, x, weight) → (dx, dweight, dbias), which are inputs 0, 1 and 2 of `ctx`.
/// weight: undefined, if it is 1. a, b, c: the gradients of dx, dweight and dbias, undefined where none came. Derived,
/// under the same names, in layer_norm's README.md and rms_norm's.
Gradients second_derivative(const autograd::Context& ctx, const Normalization& norm, std::int64_t columns,
                            const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& a, const Tensor& b,
                            const Tensor& c);

}  // namespace mica::norm

#pragma once

#include <cstdint>
#include <optional>

#include <mica/core/per_axis.h>
#include <mica/core/tensor.h>

namespace mica {

// Pooling over windows of images x (N, C, spatial axes…), or without N, of one, two or three spatial axes; floating.
// Sizes, strides and so on have a number for each spatial axis, or one for all. Results have x's dtype and layout:
// channels last if x is (core/channels_last.h), else row-major. All are differentiable any number of times, and
// gradients repeat their bits. They throw Error before anything is computed if a shape or an option does not match, or
// if a window would lie outside of the input.

struct MaxPoolOptions {
  std::optional<PerAxis> stride{};  ///< nullopt: the window's size
  PerAxis padding = 0;              ///< at most half of the window's size; padded elements never are the maximum
  PerAxis dilation = 1;
  bool ceil_mode = false;  ///< round lengths up, so that a last window may reach beyond the padded input
};

struct MaxPoolResult {
  Tensor values;
  Tensor indices;  ///< int64, of the same shape: positions in x, counted over its spatial axes in row-major order
};

/// The maximum of each window, of lengths ⌊(length + 2·padding − dilation·(size − 1) − 1) / stride⌋ + 1. A NaN is
/// larger than all numbers. The gradient goes to one element: the first of equal ones, or the last NaN.
Tensor max_pool1d(const Tensor& x, const PerAxis& size, const MaxPoolOptions& options = {});
Tensor max_pool2d(const Tensor& x, const PerAxis& size, const MaxPoolOptions& options = {});
Tensor max_pool3d(const Tensor& x, const PerAxis& size, const MaxPoolOptions& options = {});
/// The same with the positions, for any number of spatial axes.
MaxPoolResult max_pool_with_indices(const Tensor& x, int axes, const PerAxis& size, const MaxPoolOptions& options = {});

struct AvgPoolOptions {
  std::optional<PerAxis> stride{};  ///< nullopt: the window's size
  PerAxis padding = 0;              ///< zeros, at most half of the window's size
  bool ceil_mode = false;
  bool count_include_pad = true;                   ///< divide by the size of the window in the padded input
  std::optional<std::int64_t> divisor_override{};  ///< divide by this number, not 0
};

/// The mean of each window; lengths as for max_pool1d.
Tensor avg_pool1d(const Tensor& x, const PerAxis& size, const AvgPoolOptions& options = {});
Tensor avg_pool2d(const Tensor& x, const PerAxis& size, const AvgPoolOptions& options = {});
Tensor avg_pool3d(const Tensor& x, const PerAxis& size, const AvgPoolOptions& options = {});

/// Pooling to images of a given size, by windows [⌊o · in / out⌋, ⌈(o + 1) · in / out⌉). A size of −1 keeps x's.
Tensor adaptive_avg_pool1d(const Tensor& x, const PerAxis& size);
Tensor adaptive_avg_pool2d(const Tensor& x, const PerAxis& size);
Tensor adaptive_avg_pool3d(const Tensor& x, const PerAxis& size);
Tensor adaptive_max_pool1d(const Tensor& x, const PerAxis& size);
Tensor adaptive_max_pool2d(const Tensor& x, const PerAxis& size);
Tensor adaptive_max_pool3d(const Tensor& x, const PerAxis& size);
MaxPoolResult adaptive_max_pool_with_indices(const Tensor& x, int axes, const PerAxis& size);

struct LpPoolOptions {
  std::optional<PerAxis> stride{};  ///< nullopt: the window's size
  bool ceil_mode = false;
};

/// (Σ xᵖ)^(1/p) over each window. As in PyTorch, x is not replaced by |x|, and where the sum is 0, so is the
/// derivative.
Tensor lp_pool1d(const Tensor& x, double p, const PerAxis& size, const LpPoolOptions& options = {});
Tensor lp_pool2d(const Tensor& x, double p, const PerAxis& size, const LpPoolOptions& options = {});
Tensor lp_pool3d(const Tensor& x, double p, const PerAxis& size, const LpPoolOptions& options = {});

/// The partial inverse of max pooling: zeros, and the values of x at `indices`, which are int64, of x's shape and
/// positions in the result's spatial axes. For equal positions, as from overlapping windows, the mean of the values. On
/// the CPU, a position outside of the result is an Error; on CUDA, it is ignored.
/// @param output_size  the sizes of the result's spatial axes.
Tensor max_unpool1d(const Tensor& x, const Tensor& indices, const PerAxis& output_size);
Tensor max_unpool2d(const Tensor& x, const Tensor& indices, const PerAxis& output_size);
Tensor max_unpool3d(const Tensor& x, const Tensor& indices, const PerAxis& output_size);

}  // namespace mica

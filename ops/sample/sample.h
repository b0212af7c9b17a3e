#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <mica/core/per_axis.h>
#include <mica/core/tensor.h>

namespace mica {

// Resampling of images x (N, C, spatial axes…), floating. Results have x's dtype. All ops are differentiable any number
// of times, and gradients repeat their bits. They throw Error before anything is computed if a shape, dtype, device or
// option does not match.

/// How values between elements are computed. `linear` is PyTorch's linear, bilinear or trilinear, by the number of
/// axes; `cubic` is its bicubic. `area` is adaptive average pooling.
enum class Interpolation { nearest, nearest_exact, linear, cubic, area };

struct InterpolateOptions {
  std::optional<PerAxis> size{};       ///< of the result's spatial axes, or
  std::vector<double> scale_factor{};  ///< the sizes' factor, one or one for each axis: ⌊length · factor⌋
  Interpolation mode = Interpolation::nearest;
  bool align_corners = false;  ///< linear, cubic: the centers of the corners of x and y coincide, not their edges
  bool recompute_scale_factor = false;  ///< use the sizes' ratio instead of scale_factor, which rounding may change
};

/// Images of another size, of one to three spatial axes. Output o is at (o + 0.5) / factor − 0.5 or, with
/// align_corners, at o · (in − 1) / (out − 1); nearest takes ⌊o / factor⌋ and nearest_exact ⌊(o + 0.5) / factor⌋. The
/// result has x's layout.
Tensor interpolate(const Tensor& x, const InterpolateOptions& options);

struct UnfoldOptions {
  PerAxis dilation = 1;
  PerAxis padding = 0;
  PerAxis stride = 1;
};

/// The windows of images (N, C, H, W), or without N, as columns (N, C · elements of a window, number of windows):
/// im2col. Elements outside of the image are 0.
Tensor unfold(const Tensor& x, const PerAxis& size, const UnfoldOptions& options = {});
/// The transpose of unfold: images (N, C, output_size) whose elements are the sums of the columns' elements.
Tensor fold(const Tensor& columns, const PerAxis& output_size, const PerAxis& size, const UnfoldOptions& options = {});

/// (…, C · factor², H, W) → (…, C, H · factor, W · factor), and back; of any dtype.
Tensor pixel_shuffle(const Tensor& x, std::int64_t factor);
Tensor pixel_unshuffle(const Tensor& x, std::int64_t factor);

/// What positions outside of the image mean: zeros, the nearest element, or the image mirrored at its edges.
enum class SamplePadding { zeros, border, reflection };

struct GridSampleOptions {
  Interpolation mode = Interpolation::linear;  ///< nearest, linear or, for two spatial axes, cubic
  SamplePadding padding = SamplePadding::zeros;
  bool align_corners = false;  ///< −1 and 1 are the centers of the corners, not the image's edges
};

/// y[n, :, p] = x[n, :, grid[n, p]] for positions in [−1, 1], the last spatial axis first. x is (N, C, H, W) and grid
/// (N, …, 2), or x is (N, C, D, H, W) and grid (N, …, 3), of x's dtype; the result is (N, C, …), row-major.
/// Differentiable in x and grid. Composed of recorded ops.
Tensor grid_sample(const Tensor& x, const Tensor& grid, const GridSampleOptions& options = {});

/// The grid of positions theta · (position, 1), for grid_sample: theta (N, 2, 3) and size (N, C, H, W) give (N, H, W,
/// 2); theta (N, 3, 4) and size (N, C, D, H, W) give (N, D, H, W, 3).
Tensor affine_grid(const Tensor& theta, const Shape& size, bool align_corners = false);

}  // namespace mica

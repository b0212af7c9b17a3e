#pragma once

#include <cmath>
#include <cstdint>

#include <mica/core/dispatch.h>
#include <mica/core/tensor.h>
#include <mica/ops/pool/detail/pool_windows.h>

namespace mica::kernels {

// Explicitly instantiated in sample_cpu.cpp and sample_cuda.cu; `On` is Cpu or Cuda.

/// Interpolation along one axis: each output is a weighted sum of up to four inputs.
struct AxisInterpolation {
  enum class Kind { nearest, nearest_exact, linear, cubic };
  static constexpr int kMostTaps = 4;

  Kind kind = Kind::nearest;
  int in = 1;
  int out = 1;
  double scale = 1;  // the distance of outputs, in inputs
  bool align_corners = false;

  /// The position of output o among the inputs.
  MICA_HOST_DEVICE double source(int o) const {
    if (align_corners) {
      return scale * o;
    }
    const double at = scale * (o + 0.5) - 0.5;
    return kind == Kind::linear && at < 0 ? 0 : at;
  }
  /// The input to the left of output o, which does not decrease with o.
  MICA_HOST_DEVICE int base(int o) const {
    if (kind == Kind::nearest || kind == Kind::nearest_exact) {  // in float32, as PyTorch does
      const float at = (static_cast<float>(o) + (kind == Kind::nearest ? 0.0f : 0.5f)) * static_cast<float>(scale);
      const int nearest = static_cast<int>(::floorf(at));
      return nearest < in - 1 ? nearest : in - 1;
    }
    const int left = static_cast<int>(::floor(source(o)));
    return kind == Kind::linear && left > in - 1 ? in - 1 : left;
  }
  /// Calls f(input, weight) for the inputs of output o; one input may be given several times.
  template <class F>
  MICA_HOST_DEVICE void for_inputs(int o, const F& f) const {
    const int left = base(o);
    if (kind == Kind::nearest || kind == Kind::nearest_exact) {
      f(left, 1.0);
      return;
    }
    const double t = source(o) - left;
    if (kind == Kind::linear) {
      const double right = t < 0 ? 0 : t > 1 ? 1 : t;
      f(left, 1 - right);
      f(left + 1 < in ? left + 1 : left, right);
      return;
    }
    constexpr double a = -0.75;  // Keys, "Cubic convolution interpolation for digital image processing" (1981)
    const auto near = [](double d) { return ((a + 2) * d - (a + 3)) * d * d + 1; };
    const auto far = [](double d) { return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a; };
    const double weights[4] = {far(t + 1), near(t), near(1 - t), far(2 - t)};
    for (int k = 0; k < 4; ++k) {
      const int at = left - 1 + k;
      f(at < 0 ? 0 : at < in ? at : in - 1, weights[k]);
    }
  }
  /// The first output whose base is at least `input`.
  MICA_HOST_DEVICE int first_output(int input) const {
    int low = 0;
    int high = out;
    while (low < high) {
      const int middle = low + (high - low) / 2;
      base(middle) < input ? low = middle + 1 : high = middle;
    }
    return low;
  }
  /// Calls f(output, weight) for the outputs that input i is an input of.
  template <class F>
  MICA_HOST_DEVICE void for_outputs(int i, const F& f) const {
    const int end = i == in - 1 ? out : first_output(i + 2);
    for (int o = i == 0 ? 0 : first_output(i - 2); o < end; ++o) {
      double sum = 0;
      for_inputs(o, [&](int input, double weight) { sum += input == i ? weight : 0; });
      if (sum != 0) {
        f(o, sum);
      }
    }
  }
  /// Calls f(position, weight) for the terms of output `row` or, transposed, of input `row`'s gradient.
  template <class F>
  MICA_HOST_DEVICE void for_terms(bool transposed, int row, const F& f) const {
    transposed ? for_outputs(row, f) : for_inputs(row, f);
  }
  int rows(bool transposed) const { return transposed ? in : out; }
};

/// Writes the terms of each row: positions (rows, terms) of int32, −1 after the last one, and weights (rows, terms) of
/// float32 or float64.
struct InterpolationTable {
  const AxisInterpolation& axis;
  bool transposed;
  const Tensor& positions;
  const Tensor& weights;
};
template <class On>
void interpolation_table(On, const InterpolationTable& args);

/// y = Σ of x's elements times their weights along all axes. An axis without a table is copied. x and y are images in
/// one layout, channels last or row-major.
struct Resample {
  bool channels_last;
  const Tensor& x;
  const Tensor& y;
  Tensor positions[3];
  Tensor weights[3];
};
template <class On>
void resample(On, const Resample& args);

/// Row-major images (N, C, spatial axes…) and their windows as columns (N, C, taps, outputs…). Elements outside of the
/// images are 0.
struct Columns {
  const PoolWindows& windows;
  const Tensor& images;
  const Tensor& columns;
};
/// columns = the elements of each window
template <class On>
void unfold_images(On, const Columns& args);
/// images = at each element, the sum of the columns' elements that it is in
template <class On>
void fold_columns(On, const Columns& args);

}  // namespace mica::kernels

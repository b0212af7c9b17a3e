#pragma once

// The kernels of sample_kernels.h, for both devices: sample_cpu.cpp and sample_cuda.cu include the loops of their
// device first.

#include <utility>

#include <mica/ops/images/detail/image_loop.h>
#include <mica/ops/sample/detail/sample_kernels.h>

namespace mica::kernels {

namespace sample_bodies {

using images::Grid;
using images::Place;
using images::read;
using images::write;

template <class S>
struct TableRow {
  using Element = std::int64_t;  // no packs
  AxisInterpolation axis;
  bool transposed;
  int terms;
  int* positions;
  S* weights;

  template <int V>
  MICA_HOST_DEVICE void compute(const Place& p) const {
    const std::int64_t begin = std::int64_t{p.at[2]} * terms;
    int next = 0;
    axis.for_terms(transposed, p.at[2], [&](int position, double weight) {
      positions[begin + next] = position;
      weights[begin + next] = static_cast<S>(weight);
      ++next;
    });
    if (next < terms) {
      positions[begin + next] = -1;
    }
  }
};

/// The terms along one axis.
template <class S>
struct Terms {
  const int* positions;  // null: the place itself
  const S* weights;
  int count;

  /// Calls f(position, weight) for the terms of a row.
  template <class F>
  MICA_HOST_DEVICE void for_row(int row, const F& f) const {
    if (positions == nullptr) {
      f(row, S(1));
      return;
    }
    for (std::int64_t i = std::int64_t{row} * count; i < std::int64_t{row + 1} * count && positions[i] >= 0; ++i) {
      f(positions[i], weights[i]);
    }
  }
};

template <class T>
struct ResampleImages {
  using Element = T;
  using S = Accumulate<T>;
  Grid x_grid;
  Grid y_grid;
  Terms<S> terms[3];
  const T* x;
  T* y;

  template <int V>
  MICA_HOST_DEVICE void compute(const Place& p) const {
    S sum[V] = {};
    terms[0].for_row(p.at[0], [&](int a, S weight_a) {
      terms[1].for_row(p.at[1], [&](int b, S weight_b) {
        terms[2].for_row(p.at[2], [&](int c, S weight_c) {
          S values[V];
          read<V>(x + x_grid.offset(p.outer, a, b, c, p.inner), values);
          const S weight = weight_a * weight_b * weight_c;
          for (int i = 0; i < V; ++i) {
            sum[i] += weight * values[i];
          }
        });
      });
    });
    write<V>(y + y_grid.offset(p), sum);
  }
};

template <class T>
struct Unfold {
  using Element = std::int64_t;  // no packs
  PoolWindows windows;
  Grid images;
  Grid columns;
  const T* x;
  T* y;

  template <int V>
  MICA_HOST_DEVICE void compute(const Place& p) const {
    const int taps = windows.taps();
    const int tap = static_cast<int>(p.outer % taps);
    const int rest = tap / windows.axes[2].size;
    const int k[3] = {rest / windows.axes[1].size, rest % windows.axes[1].size, tap % windows.axes[2].size};
    int at[3];
    bool inside = true;
    for (int axis = 0; axis < 3; ++axis) {
      at[axis] = windows.axes[axis].first(p.at[axis]) + k[axis] * windows.axes[axis].dilation;
      inside = inside && at[axis] >= 0 && at[axis] < windows.axes[axis].in;
    }
    y[columns.offset(p)] = inside ? x[images.offset(p.outer / taps, at[0], at[1], at[2], 0)] : T(0.0f);
  }
};

template <class T>
struct Fold {
  using Element = std::int64_t;  // no packs
  PoolWindows windows;
  Grid images;
  Grid columns;
  T* x;
  const T* y;

  template <int V>
  MICA_HOST_DEVICE void compute(const Place& p) const {
    Accumulate<T> sum = 0;
    windows.for_outputs(p.at, [&](int tap, int a, int b, int c) {
      sum += static_cast<Accumulate<T>>(y[columns.offset(p.outer * windows.taps() + tap, a, b, c, 0)]);
    });
    x[images.offset(p)] = static_cast<T>(sum);
  }
};

/// The grids of row-major images and of their columns.
inline std::pair<Grid, Grid> grids_of(const Columns& a) {
  Grid images{a.images.size(0) * a.images.size(1), {1, 1, 1}, 1};
  Grid columns{images.outer * a.windows.taps(), {1, 1, 1}, 1};
  for (int axis = 0; axis < 3; ++axis) {
    images.sizes[axis] = a.windows.axes[axis].in;
    columns.sizes[axis] = a.windows.axes[axis].out;
  }
  return {images, columns};
}

}  // namespace sample_bodies

template <class On>
void interpolation_table(On device, const InterpolationTable& a) {
  const images::Grid grid{1, {1, 1, static_cast<int>(a.positions.size(0))}, 1};
  on_dtype(Types<float, double>{}, a.weights.dtype(), "interpolate", [&]<class S>() {
    images::for_images(device, "interpolation_table", grid,
                       sample_bodies::TableRow<S>{a.axis, a.transposed, static_cast<int>(a.positions.size(1)),
                                                  a.positions.data<std::int32_t>(), a.weights.data<S>()},
                       64, false);
  });
}

/// Computes the op in another way if the device has one for these images: sample_cpu.cpp overloads it.
template <class On, class Args>
bool by_rows(On, const Args&, bool /*transposed*/ = false) {
  return false;
}

template <class On>
void resample(On device, const Resample& a) {
  if (by_rows(device, a)) {
    return;
  }
  const images::Grid x = images::grid_of(a.x, a.channels_last, "interpolate"),
                     y = images::grid_of(a.y, a.channels_last, "interpolate");
  on_dtype(FloatTypes{}, a.x.dtype(), "interpolate", [&]<class T>() {
    using S = Accumulate<T>;
    sample_bodies::ResampleImages<T> body{x, y, {}, a.x.data<T>(), a.y.data<T>()};
    std::int64_t work = 1;
    for (int axis = 0; axis < 3; ++axis) {
      const Tensor& positions = a.positions[axis];
      const int count = positions.defined() ? static_cast<int>(positions.size(1)) : 1;
      body.terms[axis] = {positions.data_or_null<std::int32_t>(), a.weights[axis].template data_or_null<S>(), count};
      work *= count;
    }
    images::for_images(device, "resample", y, body, work, images::are_aligned(a.x, a.y));
  });
}

template <class On>
void unfold_images(On device, const Columns& a) {
  if (by_rows(device, a)) {
    return;
  }
  const std::pair<images::Grid, images::Grid> grids = sample_bodies::grids_of(a);
  const images::Grid from = grids.first, to = grids.second;
  on_dtype(FloatTypes{}, a.images.dtype(), "unfold", [&]<class T>() {
    images::for_images(device, "unfold_images", to,
                       sample_bodies::Unfold<T>{a.windows, from, to, a.images.data<T>(), a.columns.data<T>()}, 4,
                       false);
  });
}

template <class On>
void fold_columns(On device, const Columns& a) {
  if (by_rows(device, a, true)) {
    return;
  }
  const std::pair<images::Grid, images::Grid> grids = sample_bodies::grids_of(a);
  const images::Grid to = grids.first, from = grids.second;
  on_dtype(FloatTypes{}, a.images.dtype(), "fold", [&]<class T>() {
    images::for_images(device, "fold_columns", to,
                       sample_bodies::Fold<T>{a.windows, to, from, a.images.data<T>(), a.columns.data<T>()},
                       a.windows.taps(), false);
  });
}

#define MICA_INSTANTIATE_SAMPLE(On)                                 \
  template void interpolation_table(On, const InterpolationTable&); \
  template void resample(On, const Resample&);                      \
  template void unfold_images(On, const Columns&);                  \
  template void fold_columns(On, const Columns&);

}  // namespace mica::kernels

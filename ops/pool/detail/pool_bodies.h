#pragma once

// The kernels of pool_kernels.h, for both devices: pool_cpu.cpp and pool_cuda.cu include the loops of their device
// first.

#include <cmath>
#include <limits>

#include <mica/ops/images/detail/image_loop.h>
#include <mica/ops/pool/detail/pool_kernels.h>

namespace mica::kernels {

namespace pool_bodies {

struct Forward {};
struct Backward {};

using images::Grid;
using images::Place;
using images::read;
using images::write;

template <class T, class Tap>
struct MaxForward {
  using Element = T;
  PoolWindows windows;
  Grid x_grid;
  Grid y_grid;
  const T* x;
  T* y;
  Tap* taps;

  template <int V>
  MICA_HOST_DEVICE void compute(const Place& p) const {
    using S = Accumulate<T>;
    S most[V];
    int found[V];
    bool first = true;
    windows.for_taps(p.at, [&](int tap, int a, int b, int c) {
      S values[V];
      read<V>(x + x_grid.offset(p.outer, a, b, c, p.inner), values);
      for (int i = 0; i < V; ++i) {
        const bool above = first || values[i] > most[i] || std::isnan(values[i]);  // NaN counts as largest
        most[i] = above ? values[i] : most[i];
        found[i] = above ? tap : found[i];
      }
      first = false;
    });
    const std::int64_t to = y_grid.offset(p);
    write<V>(y + to, most);
    write<V>(taps + to, found);
  }
};

template <class T, class Tap>
struct TakeTaps {
  using Element = std::int64_t;  // no packs
  PoolWindows windows;
  Grid x_grid;
  Grid y_grid;
  const T* x;
  T* y;
  const Tap* taps;

  template <int V>
  MICA_HOST_DEVICE void compute(const Place& p) const {
    const std::int64_t to = y_grid.offset(p);
    for (int i = 0; i < V; ++i) {
      const int tap = taps[to + i];
      const auto position = [&](int axis, int k) {
        return windows.axes[axis].first(p.at[axis]) + k * windows.axes[axis].dilation;
      };
      const int rest = tap / windows.axes[2].size;
      y[to + i] =
          x[x_grid.offset(p.outer, position(0, rest / windows.axes[1].size), position(1, rest % windows.axes[1].size),
                          position(2, tap % windows.axes[2].size), p.inner + i)];
    }
  }
};

template <class T, class Tap>
struct AddTaps {
  using Element = T;
  PoolWindows windows;
  Grid x_grid;
  Grid y_grid;
  T* x;
  const T* y;
  const Tap* taps;

  template <int V>
  MICA_HOST_DEVICE void compute(const Place& p) const {
    using S = Accumulate<T>;
    S sum[V] = {};
    windows.for_outputs(p.at, [&](int tap, int a, int b, int c) {
      const std::int64_t from = y_grid.offset(p.outer, a, b, c, p.inner);
      S values[V];
      int found[V];
      read<V>(y + from, values);
      read<V>(taps + from, found);
      for (int i = 0; i < V; ++i) {
        sum[i] += found[i] == tap ? values[i] : S(0);
      }
    });
    write<V>(x + x_grid.offset(p), sum);
  }
};

template <class Tap>
struct Positions {
  using Element = std::int64_t;
  PoolWindows windows;
  Grid x_grid;
  Grid y_grid;
  const Tap* taps;
  std::int64_t* indices;

  template <int V>
  MICA_HOST_DEVICE void compute(const Place& p) const {
    const std::int64_t to = y_grid.offset(p);
    for (int i = 0; i < V; ++i) {
      const int tap = taps[to + i];
      const auto position = [&](int axis, int k) {
        return windows.axes[axis].first(p.at[axis]) + k * windows.axes[axis].dilation;
      };
      const int rest = tap / windows.axes[2].size;
      indices[to + i] = x_grid.flat(position(0, rest / windows.axes[1].size), position(1, rest % windows.axes[1].size),
                                    position(2, tap % windows.axes[2].size));
    }
  }
};

template <class S>
MICA_HOST_DEVICE S reciprocal(S n) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(S) == 4) {  // a division would call a function, which spills registers
    const float r = __fdividef(1.0f, n);
    return fmaf(fmaf(-n, r, 1.0f), r, r);
  }
#endif
  return S(1) / n;
}

struct Divisors {
  bool include_padding;
  double fixed;  // 0: depends on the window

  explicit Divisors(const AveragePool& a)
      : include_padding(a.include_padding), fixed(a.divisor == 0 ? 0 : 1 / a.divisor) {}

  /// 1 / the divisor of output o.
  template <class S>
  MICA_HOST_DEVICE S factor(const PoolWindows& windows, int a, int b, int c) const {
    if (fixed != 0) {
      return static_cast<S>(fixed);
    }
    const auto count = [&](const PoolAxis& axis, int o) {
      const int limit = include_padding ? axis.in + axis.padding : axis.in;
      const int to = axis.end(o) < limit ? axis.end(o) : limit;
      const int from = axis.first(o);
      return static_cast<S>(to - (include_padding || from >= 0 ? from : 0));
    };
    return reciprocal(count(windows.axes[0], a) * count(windows.axes[1], b) * count(windows.axes[2], c));
  }
};

template <class T>
struct AverageForward {
  using Element = T;
  PoolWindows windows;
  Grid x_grid;
  Grid y_grid;
  Divisors divisors;
  const T* x;
  T* y;

  template <int V>
  MICA_HOST_DEVICE void compute(const Place& p) const {
    using S = Accumulate<T>;
    S sum[V] = {};
    windows.for_taps(p.at, [&](int, int a, int b, int c) {
      S values[V];
      read<V>(x + x_grid.offset(p.outer, a, b, c, p.inner), values);
      for (int i = 0; i < V; ++i) {
        sum[i] += values[i];
      }
    });
    const S factor = divisors.factor<S>(windows, p.at[0], p.at[1], p.at[2]);
    for (int i = 0; i < V; ++i) {
      sum[i] *= factor;
    }
    write<V>(y + y_grid.offset(p), sum);
  }
};

template <class T>
struct AverageBackward {
  using Element = T;
  PoolWindows windows;
  Grid x_grid;
  Grid y_grid;
  Divisors divisors;
  T* x;
  const T* y;

  template <int V>
  MICA_HOST_DEVICE void compute(const Place& p) const {
    using S = Accumulate<T>;
    S sum[V] = {};
    windows.for_outputs(p.at, [&](int, int a, int b, int c) {
      S values[V];
      read<V>(y + y_grid.offset(p.outer, a, b, c, p.inner), values);
      const S factor = divisors.factor<S>(windows, a, b, c);
      for (int i = 0; i < V; ++i) {
        sum[i] += values[i] * factor;
      }
    });
    write<V>(x + x_grid.offset(p), sum);
  }
};

/// Calls f.operator()<T, Tap>().
template <class F>
void on_pool_types(DType dtype, DType taps, const F& f) {
  on_dtype(FloatTypes{}, dtype, "pool", [&]<class T>() {
    on_dtype(TapTypes{}, taps, "pool", [&]<class Tap>() { f.template operator()<T, Tap>(); });
  });
}

}  // namespace pool_bodies

/// Computes the op in another way if the device has one for these images: pool_cpu.cpp overloads it.
template <class On, class Args, class Direction>
bool by_rows(On, const Args&, Direction) {
  return false;
}

template <class On>
void max_pool_forward(On device, const MaxPool& a) {
  if (by_rows(device, a, pool_bodies::Forward{})) {
    return;
  }
  const images::Grid x = images::grid_of(a.x, a.channels_last, "max_pool"),
                     y = images::grid_of(a.y, a.channels_last, "max_pool");
  pool_bodies::on_pool_types(a.x.dtype(), a.taps.dtype(), [&]<class T, class Tap>() {
    images::for_images(
        device, "max_pool_forward", y,
        pool_bodies::MaxForward<T, Tap>{a.windows, x, y, a.x.data<T>(), a.y.data<T>(), a.taps.data<Tap>()},
        a.windows.taps(), images::are_aligned(a.x, a.y, a.taps));
  });
}

template <class On>
void take_taps(On device, const TapTransfer& a) {
  const images::Grid x = images::grid_of(a.x, a.channels_last, "max_pool"),
                     y = images::grid_of(a.y, a.channels_last, "max_pool");
  pool_bodies::on_pool_types(a.x.dtype(), a.taps.dtype(), [&]<class T, class Tap>() {
    images::for_images(device, "take_taps", y,
                       pool_bodies::TakeTaps<T, Tap>{a.windows, x, y, a.x.data<T>(), a.y.data<T>(), a.taps.data<Tap>()},
                       2, false);
  });
}

template <class On>
void add_taps(On device, const TapTransfer& a) {
  if (by_rows(device, a, pool_bodies::Backward{})) {
    return;
  }
  const images::Grid x = images::grid_of(a.x, a.channels_last, "max_pool"),
                     y = images::grid_of(a.y, a.channels_last, "max_pool");
  pool_bodies::on_pool_types(a.x.dtype(), a.taps.dtype(), [&]<class T, class Tap>() {
    images::for_images(device, "add_taps", x,
                       pool_bodies::AddTaps<T, Tap>{a.windows, x, y, a.x.data<T>(), a.y.data<T>(), a.taps.data<Tap>()},
                       a.windows.taps(), images::are_aligned(a.x, a.y, a.taps));
  });
}

template <class On>
void tap_positions(On device, const TapPositions& a) {
  const images::Grid y = images::grid_of(a.indices, a.channels_last, "max_pool");
  const images::Grid x{y.outer, {a.windows.axes[0].in, a.windows.axes[1].in, a.windows.axes[2].in}, y.inner};
  on_dtype(TapTypes{}, a.taps.dtype(), "max_pool", [&]<class Tap>() {
    images::for_images(device, "tap_positions", y,
                       pool_bodies::Positions<Tap>{a.windows, x, y, a.taps.data<Tap>(), a.indices.data<std::int64_t>()},
                       2, false);
  });
}

template <class On>
void average_pool_forward(On device, const AveragePool& a) {
  if (by_rows(device, a, pool_bodies::Forward{})) {
    return;
  }
  const images::Grid x = images::grid_of(a.x, a.channels_last, "avg_pool"),
                     y = images::grid_of(a.y, a.channels_last, "avg_pool");
  on_dtype(FloatTypes{}, a.x.dtype(), "avg_pool", [&]<class T>() {
    images::for_images(
        device, "average_pool_forward", y,
        pool_bodies::AverageForward<T>{a.windows, x, y, pool_bodies::Divisors(a), a.x.data<T>(), a.y.data<T>()},
        a.windows.taps(), images::are_aligned(a.x, a.y));
  });
}

template <class On>
void average_pool_backward(On device, const AveragePool& a) {
  if (by_rows(device, a, pool_bodies::Backward{})) {
    return;
  }
  const images::Grid x = images::grid_of(a.x, a.channels_last, "avg_pool"),
                     y = images::grid_of(a.y, a.channels_last, "avg_pool");
  on_dtype(FloatTypes{}, a.x.dtype(), "avg_pool", [&]<class T>() {
    images::for_images(
        device, "average_pool_backward", x,
        pool_bodies::AverageBackward<T>{a.windows, x, y, pool_bodies::Divisors(a), a.x.data<T>(), a.y.data<T>()},
        a.windows.taps(), images::are_aligned(a.x, a.y));
  });
}

#define MICA_INSTANTIATE_POOL(On)                             \
  template void max_pool_forward(On, const MaxPool&);         \
  template void take_taps(On, const TapTransfer&);            \
  template void add_taps(On, const TapTransfer&);             \
  template void tap_positions(On, const TapPositions&);       \
  template void average_pool_forward(On, const AveragePool&); \
  template void average_pool_backward(On, const AveragePool&);

}  // namespace mica::kernels

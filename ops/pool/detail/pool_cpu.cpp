#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include <mica/core/parallel.h>
#include <mica/ops/images/detail/image_loop_cpu.h>
#include <mica/ops/pool/detail/pool_bodies.h>

namespace mica::kernels {

namespace {

// Row-major images are pooled a row of outputs at a time: for each tap of the window, a loop over the outputs.

// A tap of the windows of a row: input j · stride + offset, for outputs j in [begin, end), is inside of the image.
struct RowTap {
  int number;
  std::int64_t offset;  // in the plane
  int begin;
  int end;
};

// The taps of the row of outputs at (o[0], o[1]), in order of their numbers.
void find_row_taps(const PoolWindows& w, const images::Grid& x, int o0, int o1, std::vector<RowTap>& taps) {
  const PoolAxis& last = w.axes[2];
  taps.clear();
  for (int a = w.axes[0].first_tap(o0); a < w.axes[0].end_tap(o0); ++a) {
    for (int b = w.axes[1].first_tap(o1); b < w.axes[1].end_tap(o1); ++b) {
      const std::int64_t row =
          x.flat(w.axes[0].first(o0) + a * w.axes[0].dilation, w.axes[1].first(o1) + b * w.axes[1].dilation, 0);
      for (int c = 0; c < last.size; ++c) {
        const auto [begin, end] = last.outputs_with_tap(c);
        taps.push_back({w.number(a, b, c), row + c * last.dilation - last.padding, begin, end});
      }
    }
  }
}

// Calls f(begin, end) for ranges of planes in parallel.
template <class F>
void for_planes(const PoolWindows& w, std::int64_t planes, const F& f) {
  const std::int64_t work = std::int64_t{w.axes[0].out} * w.axes[1].out * w.axes[2].out * w.taps();
  parallel_for(planes, std::max<std::int64_t>(65'536 / work, 1),
               [&](std::int64_t begin, std::int64_t end) { f(begin, end); });
}

template <class T, class Tap>
void max_of_plane(const PoolWindows& w, const images::Grid& x_grid, const T* x, T* y, Tap* taps) {
  using S = Accumulate<T>;
  const int n = w.axes[2].out;
  const int stride = w.axes[2].stride;
  std::vector<RowTap> row_taps;
  std::vector<S> most(n);
  std::vector<int> found(n);
  for (int row = 0; row < w.axes[0].out * w.axes[1].out; ++row, y += n, taps += n) {
    find_row_taps(w, x_grid, row / w.axes[1].out, row % w.axes[1].out, row_taps);
    std::fill(most.begin(), most.end(), -std::numeric_limits<S>::infinity());
    const int first_of_row = row_taps.front().number / w.axes[2].size * w.axes[2].size;
    for (int j = 0; j < n; ++j) {
      found[j] = first_of_row + w.axes[2].first_tap(j);
    }
    for (const RowTap& tap : row_taps) {
      S* const best = most.data();
      int* const where = found.data();
      MICA_INDEPENDENT
      for (int j = tap.begin; j < tap.end; ++j) {
        const S value = static_cast<S>(x[tap.offset + std::int64_t{j} * stride]);
        const bool above = (value > best[j]) | std::isnan(value);  // NaN counts as largest
        best[j] = above ? value : best[j];
        where[j] = above ? tap.number : where[j];
      }
    }
    for (int j = 0; j < n; ++j) {
      y[j] = static_cast<T>(most[j]);
      taps[j] = static_cast<Tap>(found[j]);
    }
  }
}

template <class T>
void average_of_plane(const PoolWindows& w, const pool_bodies::Divisors& divisors, const images::Grid& x_grid,
                      const T* x, T* y) {
  using S = Accumulate<T>;
  const int n = w.axes[2].out;
  const int stride = w.axes[2].stride;
  std::vector<RowTap> row_taps;
  std::vector<S> sums(n);
  for (int row = 0; row < w.axes[0].out * w.axes[1].out; ++row, y += n) {
    const int o0 = row / w.axes[1].out, o1 = row % w.axes[1].out;
    find_row_taps(w, x_grid, o0, o1, row_taps);
    std::fill(sums.begin(), sums.end(), S(0));
    for (const RowTap& tap : row_taps) {
      S* const sum = sums.data();
      MICA_INDEPENDENT
      for (int j = tap.begin; j < tap.end; ++j) {
        sum[j] += static_cast<S>(x[tap.offset + std::int64_t{j} * stride]);
      }
    }
    for (int j = 0; j < n; ++j) {
      y[j] = static_cast<T>(sums[j] * divisors.factor<S>(w, o0, o1, j));
    }
  }
}

template <class T>
void average_gradient_of_plane(const PoolWindows& w, const pool_bodies::Divisors& divisors, const images::Grid& x_grid,
                               const T* y, Accumulate<T>* x) {
  using S = Accumulate<T>;
  const int n = w.axes[2].out;
  const int stride = w.axes[2].stride;
  std::vector<RowTap> row_taps;
  std::vector<S> gradients(n);
  for (int row = 0; row < w.axes[0].out * w.axes[1].out; ++row, y += n) {
    const int o0 = row / w.axes[1].out, o1 = row % w.axes[1].out;
    find_row_taps(w, x_grid, o0, o1, row_taps);
    for (int j = 0; j < n; ++j) {
      gradients[j] = static_cast<S>(y[j]) * divisors.factor<S>(w, o0, o1, j);
    }
    for (const RowTap& tap : row_taps) {
      const S* const from = gradients.data();
      MICA_INDEPENDENT
      for (int j = tap.begin; j < tap.end; ++j) {
        x[tap.offset + std::int64_t{j} * stride] += from[j];
      }
    }
  }
}

template <class T, class Tap>
void add_taps_of_plane(const PoolWindows& w, const images::Grid& x_grid, const T* y, const Tap* taps,
                       Accumulate<T>* x) {
  std::vector<std::int64_t> offsets(w.taps());
  for (int tap = 0; tap < w.taps(); ++tap) {
    const int rest = tap / w.axes[2].size;
    offsets[tap] = x_grid.flat(rest / w.axes[1].size * w.axes[0].dilation, rest % w.axes[1].size * w.axes[1].dilation,
                               tap % w.axes[2].size * w.axes[2].dilation);
  }
  for (int row = 0; row < w.axes[0].out * w.axes[1].out; ++row) {
    const std::int64_t from =
        x_grid.flat(w.axes[0].first(row / w.axes[1].out), w.axes[1].first(row % w.axes[1].out), 0);
    for (int j = 0; j < w.axes[2].out; ++j) {
      x[from + w.axes[2].first(j) + offsets[*taps++]] += static_cast<Accumulate<T>>(*y++);
    }
  }
}

// Calls add(plane, sums) for all planes of x, where sums are zeros, and stores the sums in x.
template <class T, class F>
void add_to_planes(const PoolWindows& w, const images::Grid& grid, T* x, const F& add) {
  using S = Accumulate<T>;
  const std::int64_t n = grid.plane();
  for_planes(w, grid.outer, [&](std::int64_t begin, std::int64_t end) {
    std::vector<S> sums(n);
    for (std::int64_t plane = begin; plane < end; ++plane) {
      std::fill(sums.begin(), sums.end(), S(0));
      add(plane, sums.data());
      for (std::int64_t i = 0; i < n; ++i) {
        x[plane * n + i] = static_cast<T>(sums[i]);
      }
    }
  });
}

}  // namespace

// Row-major images with windows of one size; see pool_bodies.h.

static bool by_rows(Cpu, const MaxPool& a, pool_bodies::Forward) {
  const PoolWindows& w = a.windows;
  if (a.channels_last || w.axes[2].adaptive) {
    return false;
  }
  const images::Grid x = images::grid_of(a.x, false, "max_pool"), y = images::grid_of(a.y, false, "max_pool");
  pool_bodies::on_pool_types(a.x.dtype(), a.taps.dtype(), [&]<class T, class Tap>() {
    for_planes(w, x.outer, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t p = begin; p < end; ++p) {
        max_of_plane(w, x, a.x.data<T>() + p * x.plane(), a.y.data<T>() + p * y.plane(),
                     a.taps.data<Tap>() + p * y.plane());
      }
    });
  });
  return true;
}

static bool by_rows(Cpu, const TapTransfer& a, pool_bodies::Backward) {
  if (a.channels_last) {
    return false;
  }
  const images::Grid x = images::grid_of(a.x, false, "max_pool"), y = images::grid_of(a.y, false, "max_pool");
  pool_bodies::on_pool_types(a.x.dtype(), a.taps.dtype(), [&]<class T, class Tap>() {
    add_to_planes(a.windows, x, a.x.data<T>(), [&](std::int64_t p, Accumulate<T>* sums) {
      add_taps_of_plane(a.windows, x, a.y.data<T>() + p * y.plane(), a.taps.data<Tap>() + p * y.plane(), sums);
    });
  });
  return true;
}

static bool by_rows(Cpu, const AveragePool& a, pool_bodies::Forward) {
  const PoolWindows& w = a.windows;
  if (a.channels_last || w.axes[2].adaptive) {
    return false;
  }
  const images::Grid x = images::grid_of(a.x, false, "avg_pool"), y = images::grid_of(a.y, false, "avg_pool");
  on_dtype(FloatTypes{}, a.x.dtype(), "avg_pool", [&]<class T>() {
    for_planes(w, x.outer, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t p = begin; p < end; ++p) {
        average_of_plane(w, pool_bodies::Divisors(a), x, a.x.data<T>() + p * x.plane(), a.y.data<T>() + p * y.plane());
      }
    });
  });
  return true;
}

static bool by_rows(Cpu, const AveragePool& a, pool_bodies::Backward) {
  const PoolWindows& w = a.windows;
  if (a.channels_last || w.axes[2].adaptive) {
    return false;
  }
  const images::Grid x = images::grid_of(a.x, false, "avg_pool"), y = images::grid_of(a.y, false, "avg_pool");
  on_dtype(FloatTypes{}, a.x.dtype(), "avg_pool", [&]<class T>() {
    add_to_planes(w, x, a.x.data<T>(), [&](std::int64_t p, Accumulate<T>* sums) {
      average_gradient_of_plane(w, pool_bodies::Divisors(a), x, a.y.data<T>() + p * y.plane(), sums);
    });
  });
  return true;
}

MICA_INSTANTIATE_POOL(Cpu)

}  // namespace mica::kernels

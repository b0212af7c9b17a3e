#include <array>
#include <type_traits>
#include <vector>

#include <mica/ops/softmax/detail/row_cpu.h>
#include <mica/ops/softmax/detail/softmax_kernels.h>

namespace mica::kernels {

namespace {

constexpr std::int64_t kGrain = 4096;  // with fewer elements per thread, threads cost more than they save

std::int64_t rows_per_thread(std::int64_t n) { return std::max<std::int64_t>(kGrain / n, 1); }

// Softmax over the last axis: x is (rows, n).

template <class T>
void softmax_row(const T* x, T* y, std::int64_t n, std::vector<Accumulate<T>>& scratch) {
  using V = Accumulate<T>;
  V* e;  // exp(x - largest), stored in y if y has type V
  if constexpr (std::is_same_v<T, V>) {
    e = y;
  } else {
    scratch.resize(n);
    e = scratch.data();
  }
  const V largest = row_max(x, n);
  const V sum = row_sum<V>(n, [=](std::int64_t i) {
    const V value = math::exp(static_cast<V>(x[i]) - largest);
    e[i] = value;
    return value;
  });
  const V scale = 1 / sum;
  MICA_INDEPENDENT
  for (std::int64_t i = 0; i < n; ++i) {
    y[i] = static_cast<T>(e[i] * scale);
  }
}

template <class T>
void log_softmax_row(const T* x, T* y, std::int64_t n) {
  using V = Accumulate<T>;
  const V largest = row_max(x, n);
  const V log_sum = math::log(row_sum_exp(x, n, largest));
  MICA_INDEPENDENT
  for (std::int64_t i = 0; i < n; ++i) {
    y[i] = static_cast<T>(static_cast<V>(x[i]) - largest - log_sum);
  }
}

template <class T, bool kLog>
void backward_row(const T* y, const T* dy, T* dx, std::int64_t n) {
  using V = Accumulate<T>;
  if constexpr (kLog) {
    const V sum = row_sum<V>(n, [=](std::int64_t i) { return static_cast<V>(dy[i]); });
    MICA_INDEPENDENT
    for (std::int64_t i = 0; i < n; ++i) {
      dx[i] = static_cast<T>(static_cast<V>(dy[i]) - math::exp(static_cast<V>(y[i])) * sum);
    }
  } else {
    const V sum = row_sum<V>(n, [=](std::int64_t i) { return static_cast<V>(dy[i]) * static_cast<V>(y[i]); });
    MICA_INDEPENDENT
    for (std::int64_t i = 0; i < n; ++i) {
      dx[i] = static_cast<T>(static_cast<V>(y[i]) * (static_cast<V>(dy[i]) - sum));
    }
  }
}

// Softmax over another axis: x is (outer, n, inner), processed in tiles of columns.

constexpr std::int64_t kTile = 64;
constexpr std::int64_t kBlock = 64;  // rows that are summed in V before they are added to the total, in double

/// total[c] = Σ f(row, c) over n rows, `width` columns at once.
template <class V, class F>
std::array<V, kTile> column_sums(std::int64_t n, std::int64_t width, const F& f) {
  std::array<double, kTile> total{};
  for (std::int64_t begin = 0; begin < n; begin += kBlock) {
    std::array<V, kTile> block{};
    const std::int64_t end = std::min(n, begin + kBlock);
    for (std::int64_t row = begin; row < end; ++row) {
      MICA_INDEPENDENT
      for (std::int64_t c = 0; c < width; ++c) {
        block[c] += f(row, c);
      }
    }
    for (std::int64_t c = 0; c < width; ++c) {
      total[c] += block[c];
    }
  }
  std::array<V, kTile> sums{};
  std::copy_n(total.begin(), width, sums.begin());
  return sums;
}

/// Calls f(offset, width) for every tile of columns. Element (row, c) of a tile is at offset + row * inner + c.
template <class F>
void for_tiles(const AxisSplit& split, const F& f) {
  const std::int64_t tiles = (split.inner + kTile - 1) / kTile;
  const std::int64_t grain = rows_per_thread(split.n * std::min(kTile, split.inner));
  parallel_for(split.outer * tiles, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t column = i % tiles * kTile;
      f(i / tiles * split.n * split.inner + column, std::min(kTile, split.inner - column));
    }
  });
}

template <class T, bool kLog>
void forward_tile(const T* x, T* y, std::int64_t n, std::int64_t inner, std::int64_t width) {
  using V = Accumulate<T>;
  const ExtremeOp<T, true> extreme;
  std::array<V, kTile> largest;
  largest.fill(extreme.identity());
  for (std::int64_t row = 0; row < n; ++row) {
    MICA_INDEPENDENT
    for (std::int64_t c = 0; c < width; ++c) {
      largest[c] = extreme.combine(largest[c], static_cast<V>(x[row * inner + c]));
    }
  }
  std::array<V, kTile> sum = column_sums<V>(n, width, [&](std::int64_t row, std::int64_t c) {
    return math::exp(static_cast<V>(x[row * inner + c]) - largest[c]);
  });
  for (std::int64_t c = 0; c < width; ++c) {
    sum[c] = kLog ? math::log(sum[c]) : 1 / sum[c];
  }
  for (std::int64_t row = 0; row < n; ++row) {
    MICA_INDEPENDENT
    for (std::int64_t c = 0; c < width; ++c) {
      const V centered = static_cast<V>(x[row * inner + c]) - largest[c];
      y[row * inner + c] = static_cast<T>(kLog ? centered - sum[c] : math::exp(centered) * sum[c]);
    }
  }
}

template <class T, bool kLog>
void backward_tile(const T* y, const T* dy, T* dx, std::int64_t n, std::int64_t inner, std::int64_t width) {
  using V = Accumulate<T>;
  const std::array<V, kTile> sum = column_sums<V>(n, width, [&](std::int64_t row, std::int64_t c) {
    const V g = static_cast<V>(dy[row * inner + c]);
    return kLog ? g : g * static_cast<V>(y[row * inner + c]);
  });
  for (std::int64_t row = 0; row < n; ++row) {
    MICA_INDEPENDENT
    for (std::int64_t c = 0; c < width; ++c) {
      const std::int64_t i = row * inner + c;
      const V g = static_cast<V>(dy[i]);
      const V out = static_cast<V>(y[i]);
      dx[i] = static_cast<T>(kLog ? g - math::exp(out) * sum[c] : out * (g - sum[c]));
    }
  }
}

template <bool kLog>
void forward(const SoftmaxForward& args) {
  const AxisSplit split(args.x.shape(), args.axis);
  on_dtype(FloatTypes{}, args.x.dtype(), kLog ? "log_softmax" : "softmax", [&]<class T>() {
    const T* x = args.x.data<T>();
    T* y = args.y.data<T>();
    if (split.inner > 1) {
      for_tiles(split, [&](std::int64_t at, std::int64_t width) {
        forward_tile<T, kLog>(x + at, y + at, split.n, split.inner, width);
      });
      return;
    }
    parallel_for(split.outer, rows_per_thread(split.n), [&](std::int64_t begin, std::int64_t end) {
      std::vector<Accumulate<T>> scratch;
      for (std::int64_t row = begin; row < end; ++row) {
        if constexpr (kLog) {
          log_softmax_row(x + row * split.n, y + row * split.n, split.n);
        } else {
          softmax_row(x + row * split.n, y + row * split.n, split.n, scratch);
        }
      }
    });
  });
}

template <bool kLog>
void backward(const SoftmaxBackward& args) {
  const AxisSplit split(args.y.shape(), args.axis);
  on_dtype(FloatTypes{}, args.y.dtype(), kLog ? "log_softmax" : "softmax", [&]<class T>() {
    const T* y = args.y.data<T>();
    const T* dy = args.dy.data<T>();
    T* dx = args.dx.data<T>();
    if (split.inner > 1) {
      for_tiles(split, [&](std::int64_t at, std::int64_t width) {
        backward_tile<T, kLog>(y + at, dy + at, dx + at, split.n, split.inner, width);
      });
      return;
    }
    parallel_for(split.outer, rows_per_thread(split.n), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) {
        const std::int64_t at = row * split.n;
        backward_row<T, kLog>(y + at, dy + at, dx + at, split.n);
      }
    });
  });
}

}  // namespace

void softmax(Cpu, const SoftmaxForward& args) { forward<false>(args); }
void log_softmax(Cpu, const SoftmaxForward& args) { forward<true>(args); }
void softmax_backward(Cpu, const SoftmaxBackward& args) { backward<false>(args); }
void log_softmax_backward(Cpu, const SoftmaxBackward& args) { backward<true>(args); }

}  // namespace mica::kernels

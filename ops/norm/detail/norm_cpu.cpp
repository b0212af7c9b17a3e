// GCC 12 wrongly reports uses of uninitialized variables in its own AVX-512 intrinsics.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#ifndef EIGEN_DONT_PARALLELIZE
#define EIGEN_DONT_PARALLELIZE
#endif
#include <Eigen/Core>

#include <algorithm>
#include <array>
#include <cmath>
#include <type_traits>

#include <mica/core/parallel.h>
#include <mica/ops/norm/detail/norm_backward.h>
#include <mica/ops/norm/detail/norm_forward.h>
#include <mica/ops/rows/detail/rows_cpu.h>

// S is the type of sums: float, or double if x is double. kCentered: a layer norm; otherwise an RMS norm.

namespace mica::kernels {

namespace {

template <class S>
struct Moments {
  S shift;     // the first element, or 0 if not centered
  S mean;      // relative to the shift, so that it is exactly 0 for a row of equal elements
  S variance;  // or mean square
};

template <bool kCentered, class S>
[[gnu::flatten]] Moments<S> moments(const S* x, std::int64_t n, Prefetch y) {
  const S shift = kCentered ? x[0] : S(0);
  S mean = 0;
  if constexpr (kCentered) {
    mean = sum_of<S>(n, [&]<class V>(std::int64_t i) -> V { return load<V>(x + i) - shift; }) / n;
  }
  const S variance = sum_of<S>(n,
                               [&]<class V>(std::int64_t i) -> V {
                                 y.fetch(i);
                                 const V d = kCentered ? (load<V>(x + i) - shift) - mean : load<V>(x + i);
                                 return d * d;
                               }) /
                     n;
  return {shift, mean, variance};
}

template <bool kCentered, class S>
[[gnu::flatten]] void normalize(const S* x, std::int64_t n, const Moments<S>& m, S rstd, const S* weight, const S* bias,
                                S* y, Prefetch next_x) {
  for_packs<S>(0, n, [&]<class V, int>(std::int64_t i) {
    next_x.fetch(i);
    if constexpr (kCentered) {
      const V x_hat = ((load<V>(x + i) - m.shift) - m.mean) * rstd;
      store<V>(y + i, x_hat * load<V>(weight + i) + load<V>(bias + i));
    } else {
      store<V>(y + i, load<V>(x + i) * rstd * load<V>(weight + i));
    }
  });
}

// A row of sum = residual + (x + x_bias).
template <class T, class S>
[[gnu::flatten]] void add_row(const T* x, const T* residual, const S* x_bias, std::int64_t n, T* sum,
                              std::array<Buffer<S>, 3>& buffers) {
  const S* const a = as_sums<S>(x, n, buffers[0]);
  const S* const b = as_sums<S>(residual, n, buffers[1]);
  write_as<S>(sum, n, buffers[2], [&](S* to) {
    for_packs<S>(0, n, [&]<class V, int>(std::int64_t i) {
      store<V>(to + i, load<V>(b + i) + (load<V>(a + i) + load<V>(x_bias + i)));
    });
  });
}

template <bool kCentered, class T, class S = Accumulate<T>>
void forward_rows(const NormForward& args, std::int64_t begin, std::int64_t end, const S* weight, const S* bias,
                  const S* x_bias) {
  const std::int64_t n = args.columns;
  S* const means = args.mean.data_or_null<S>();
  S* const mean_rests = mean_rest_of<S>(args.mean);
  S* const rstds = args.rstd.data_or_null<S>();
  Buffer<S> buffer;
  std::array<Buffer<S>, 3> of_sum;
  for (std::int64_t row = begin; row < end; ++row) {
    const T* x_row = args.x.data<T>() + row * n;
    T* const y_row = args.y.data<T>() + row * n;
    const Prefetch next_x(row + 1 < end ? x_row + n : x_row);
    if (args.sum.defined()) {
      T* const sum_row = args.sum.data<T>() + row * n;
      add_row(x_row, args.residual.data<T>() + row * n, x_bias, n, sum_row, of_sum);
      x_row = sum_row;
    }
    const S* x = as_sums<S>(x_row, n, buffer);
    Moments<S> m = moments<kCentered>(x, n, Prefetch(y_row));
    S scale = 1;
    if (kCentered && !std::isfinite(m.variance)) [[unlikely]] {
      scale = kShrink<S>;
      buffer = Eigen::Map<const Buffer<S>>(x, n) * scale;
      x = buffer.data();
      m = moments<kCentered>(x, n, Prefetch(y_row));
    }
    const S rstd = 1 / std::sqrt(m.variance + static_cast<S>(args.eps) * scale * scale);
    write_as<S>(y_row, n, buffer, [&](S* y) { normalize<kCentered>(x, n, m, rstd, weight, bias, y, next_x); });
    if (rstds != nullptr) {
      rstds[row] = rstd * scale;
    }
    if (means != nullptr) {
      means[row] = (m.shift + m.mean) / scale;
      if (mean_rests != nullptr) {
        mean_rests[row] = mean_rounding(m.shift, m.mean) * rstd;
      }
    }
  }
}

// The arguments of backward for one row. Functions copy them, so that the compiler knows that no store changes them.
template <bool kCentered_, class S>
struct BackwardRow {
  static constexpr bool kCentered = kCentered_;
  std::int64_t n;
  const S* dy;
  const S* x;
  const S* weight;
  S mean;
  S rstd;
  S mean_rest;
  S* dweight;
  S* dbias;
  Prefetch dx_prefetch;
  Prefetch next_dy;
  Prefetch next_x;

  template <class V>
  V x_hat(std::int64_t i) const {
    if constexpr (kCentered) {
      return multiply_add<V, S>(load<V>(x + i) - mean, rstd, mean_rest);
    } else {
      return load<V>(x + i) * rstd;
    }
  }
};

template <class V, class Row>
void add_parameters_at(std::int64_t i, const Row& row, V dy, V x_hat) {
  store<V>(row.dweight + i, load<V>(row.dweight + i) + dy * x_hat);
  if constexpr (Row::kCentered) {
    store<V>(row.dbias + i, load<V>(row.dbias + i) + dy);
  }
}

template <bool kCentered, class S>
[[gnu::flatten]] void add_parameters(const BackwardRow<kCentered, S>& given) {
  const BackwardRow<kCentered, S> row = given;
  for_packs<S>(0, row.n, [&]<class V, int>(std::int64_t i) {
    row.next_x.fetch(i);
    row.next_dy.fetch(i);
    add_parameters_at<V>(i, row, load<V>(row.dy + i), row.template x_hat<V>(i));
  });
}

template <bool with_parameters, bool kCentered, class S>
[[gnu::flatten]] void write_dx(const BackwardRow<kCentered, S>& given, S* dx) {
  const BackwardRow<kCentered, S> row = given;
  double g_total = 0;
  double gx_total = 0;
  for_parts(row.n, [&](std::int64_t begin, std::int64_t end) {
    Sum<S> g_sum;
    Sum<S> gx_sum;
    for_packs<S>(begin, end, [&]<class V, int k>(std::int64_t i) {
      row.dx_prefetch.fetch(i);
      const V dy = load<V>(row.dy + i);
      const V x_hat = row.template x_hat<V>(i);
      const V g = dy * load<V>(row.weight + i);
      if constexpr (kCentered) {
        g_sum.template add<k, V>(g);
      }
      gx_sum.template add<k, V>(g * x_hat);
      if constexpr (with_parameters) {
        add_parameters_at<V>(i, row, dy, x_hat);
      }
    });
    g_total += g_sum.total();
    gx_total += gx_sum.total();
  });
  const S g_mean = g_total / row.n;
  const S gx_mean = gx_total / row.n;
  for_packs<S>(0, row.n, [&]<class V, int>(std::int64_t i) {
    row.next_x.fetch(i);
    row.next_dy.fetch(i);
    const V g = load<V>(row.dy + i) * load<V>(row.weight + i);
    const V centered_g = kCentered ? g - g_mean : g;
    store<V>(dx + i, (centered_g - row.template x_hat<V>(i) * gx_mean) * row.rstd);
  });
}

// Computes the gradients of rows [begin, end). Adds to dweight and, if centered, to dbias, unless they are null.
template <bool kCentered, class T, class S = Accumulate<T>>
void backward_rows(const NormBackward& args, std::int64_t begin, std::int64_t end, const S* weight, S* dweight,
                   S* dbias) {
  const std::int64_t n = args.columns;
  const bool with_dx = args.dx.defined();
  const S* const means = args.mean.data_or_null<S>();
  const S* const mean_rests = mean_rest_of<S>(args.mean);
  const S* const rstds = args.rstd.data<S>();
  Buffer<S> dy_buffer;
  Buffer<S> x_buffer;
  for (std::int64_t row = begin; row < end; ++row) {
    const T* const dy = args.dy.data<T>() + row * n;
    const T* const x = args.x.data<T>() + row * n;
    T* const dx = with_dx ? args.dx.data<T>() + row * n : nullptr;
    const std::int64_t to_next = row + 1 < end ? n : 0;
    const BackwardRow<kCentered, S> work{.n = n,
                                         .dy = as_sums<S>(dy, n, dy_buffer),
                                         .x = as_sums<S>(x, n, x_buffer),
                                         .weight = weight,
                                         .mean = kCentered ? means[row] : S(0),
                                         .rstd = rstds[row],
                                         .mean_rest = mean_rests != nullptr ? mean_rests[row] : S(0),
                                         .dweight = dweight,
                                         .dbias = dbias,
                                         .dx_prefetch = Prefetch(dx),
                                         .next_dy = Prefetch(dy + to_next),
                                         .next_x = Prefetch(x + to_next)};
    if (!with_dx) {
      add_parameters(work);
    } else if (dweight == nullptr) {
      write_as<S>(dx, n, x_buffer, [&](S* to) { write_dx<false>(work, to); });
    } else {
      write_as<S>(dx, n, x_buffer, [&](S* to) { write_dx<true>(work, to); });
    }
  }
}

// Rows are divided into blocks. Each block has its own dweight and dbias, which are added up in order.
template <bool kCentered, class T>
void backward(const NormBackward& args) {
  using S = Accumulate<T>;
  const std::int64_t n = args.columns;
  const std::int64_t blocks = row_blocks(args.rows, n);
  const bool parameters = args.dweight.defined() || args.dbias.defined();
  const Buffer<S> weight = parameter<T>(args.weight, n, 1, "norm");
  const Tensor scratch = parameters ? empty({kCentered ? 2 : 1, blocks, n}, dtype_of<S>) : Tensor{};
  S* const dweights = scratch.data_or_null<S>();
  S* const dbiases = parameters && kCentered ? dweights + blocks * n : nullptr;
  const auto of_block = [&](S* sums, std::int64_t block) { return sums == nullptr ? nullptr : sums + block * n; };
  const std::int64_t per_block = blocks == 0 ? 1 : args.rows * n / blocks;
  parallel_for(blocks, std::max<std::int64_t>(kRowGrain / per_block, 1), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t block = begin; block < end; ++block) {
      S* const dweight = of_block(dweights, block);
      S* const dbias = of_block(dbiases, block);
      for (S* const sums : {dweight, dbias}) {
        if (sums != nullptr) {
          std::fill_n(sums, n, S(0));
        }
      }
      backward_rows<kCentered, T>(args, args.rows * block / blocks, args.rows * (block + 1) / blocks, weight.data(),
                                  dweight, dbias);
    }
  });
  sum_partials<T>(args.dweight, dweights, blocks, "norm");
  sum_partials<T>(args.dbias, dbiases, blocks, "norm");
}

}  // namespace

void norm_forward(Cpu, const NormForward& args) {
  on_dtype(FloatTypes{}, args.x.dtype(), "norm", [&]<class T>() {
    using S = Accumulate<T>;
    const Buffer<S> weight = parameter<T>(args.weight, args.columns, 1, "norm");
    const Buffer<S> bias = parameter<T>(args.bias, args.centered ? args.columns : 0, 0, "norm");
    const Buffer<S> x_bias = parameter<T>(args.x_bias, args.sum.defined() ? args.columns : 0, 0, "norm");
    parallel_for(args.rows, std::max<std::int64_t>(kRowGrain / args.columns, 1),
                 [&](std::int64_t begin, std::int64_t end) {
                   args.centered ? forward_rows<true, T>(args, begin, end, weight.data(), bias.data(), x_bias.data())
                                 : forward_rows<false, T>(args, begin, end, weight.data(), bias.data(), x_bias.data());
                 });
  });
}

bool add_norm_forward(Cpu, const NormForward& args) {
  if (args.dropout.drops()) {
    return false;
  }
  norm_forward(Cpu{}, args);
  return true;
}

void norm_backward(Cpu, const NormBackward& args) {
  on_dtype(FloatTypes{}, args.x.dtype(), "norm",
           [&]<class T>() { args.centered ? backward<true, T>(args) : backward<false, T>(args); });
}

}  // namespace mica::kernels

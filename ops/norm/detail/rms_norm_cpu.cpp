// GCC 12 takes its own AVX-512 intrinsics for uses of uninitialized variables.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#ifndef EIGEN_DONT_PARALLELIZE
#define EIGEN_DONT_PARALLELIZE
#endif
#include <Eigen/Core>

#include <algorithm>
#include <cmath>

#include <mica/core/parallel.h>
#include <mica/ops/detail/rows_cpu.h>
#include <mica/ops/norm/detail/rms_norm_kernels.h>

// S is the type of sums: float, or double for double.

namespace mica::kernels {

namespace {

template <class S>
[[gnu::flatten]] S mean_square(const S* x, std::int64_t n, Prefetch y) {
  const double sum = sum_of<S>(n, [&]<class V>(std::int64_t i) -> V {
    y.fetch(i);
    const V value = load<V>(x + i);
    return value * value;
  });
  return static_cast<S>(sum / static_cast<double>(n));
}

template <class S>
[[gnu::flatten]] void scale_row(const S* x, std::int64_t n, S rstd, const S* weight, S* y, Prefetch next_x) {
  for_packs<S>(0, n, [&]<class V, int>(std::int64_t i) {
    next_x.fetch(i);
    store<V>(y + i, load<V>(x + i) * rstd * load<V>(weight + i));
  });
}

template <class T, class S = Accumulate<T>>
void forward_rows(const NormForward& args, std::int64_t begin, std::int64_t end, const S* weight) {
  const std::int64_t n = args.columns;
  S* const rstds = args.rstd.data_or_null<S>();
  Buffer<S> buffer;
  for (std::int64_t row = begin; row < end; ++row) {
    const T* const x_row = args.x.data<T>() + row * n;
    T* const y_row = args.y.data<T>() + row * n;
    const S* const x = as_sums<S>(x_row, n, buffer);
    const S rstd = 1 / std::sqrt(mean_square(x, n, Prefetch(y_row)) + static_cast<S>(args.eps));
    write_as<S>(y_row, n, buffer,
                [&](S* y) { scale_row(x, n, rstd, weight, y, Prefetch(row + 1 < end ? x_row + n : x_row)); });
    if (rstds != nullptr) {
      rstds[row] = rstd;
    }
  }
}

// Backward of one row. Functions copy it, so that the compiler sees that no store changes it.
template <class S>
struct BackwardRow {
  std::int64_t n;
  const S* dy;
  const S* x;
  const S* weight;
  S rstd;

  template <class V>
  V x_hat(std::int64_t i) const {
    return load<V>(x + i) * rstd;
  }
};

template <class S>
[[gnu::flatten]] void add_weight(const BackwardRow<S>& given, S* dweight) {
  const BackwardRow<S> row = given;
  for_packs<S>(0, row.n, [&]<class V, int>(std::int64_t i) {
    const V sum = load<V>(dweight + i) + load<V>(row.dy + i) * row.template x_hat<V>(i);
    store<V>(dweight + i, sum);
  });
}

template <class S>
[[gnu::flatten]] void write_dx(const BackwardRow<S>& given, S* dx, Prefetch dx_prefetch, Prefetch next_dy,
                               Prefetch next_x) {
  const BackwardRow<S> row = given;
  const double sum = sum_of<S>(row.n, [&]<class V>(std::int64_t i) -> V {
    dx_prefetch.fetch(i);
    return load<V>(row.dy + i) * load<V>(row.weight + i) * row.template x_hat<V>(i);
  });
  const S mean = static_cast<S>(sum / static_cast<double>(row.n));
  for_packs<S>(0, row.n, [&]<class V, int>(std::int64_t i) {
    next_x.fetch(i);
    next_dy.fetch(i);
    const V g = load<V>(row.dy + i) * load<V>(row.weight + i);
    store<V>(dx + i, (g - row.template x_hat<V>(i) * mean) * row.rstd);
  });
}

// Rows [begin, end); adds to dweight, unless null.
template <class T, class S = Accumulate<T>>
void backward_rows(const RMSNormBackward& args, std::int64_t begin, std::int64_t end, const S* weight, S* dweight) {
  const std::int64_t n = args.columns;
  Buffer<S> dy_buffer;
  Buffer<S> x_buffer;
  for (std::int64_t row = begin; row < end; ++row) {
    const T* const dy = args.dy.data<T>() + row * n;
    const T* const x = args.x.data<T>() + row * n;
    const std::int64_t to_next = row + 1 < end ? n : 0;
    const BackwardRow<S> work{.n = n,
                              .dy = as_sums<S>(dy, n, dy_buffer),
                              .x = as_sums<S>(x, n, x_buffer),
                              .weight = weight,
                              .rstd = args.rstd.data<S>()[row]};
    if (dweight != nullptr) {
      add_weight(work, dweight);
    }
    if (args.dx.defined()) {
      T* const dx = args.dx.data<T>() + row * n;
      write_as<S>(dx, n, x_buffer,
                  [&](S* to) { write_dx(work, to, Prefetch(dx), Prefetch(dy + to_next), Prefetch(x + to_next)); });
    }
  }
}

}  // namespace

void rms_norm_forward(Cpu, const NormForward& args) {
  on_dtype(FloatTypes{}, args.x.dtype(), "rms_norm", [&]<class T>() {
    const auto weight = parameter<T>(args.weight, args.columns, 1, "rms_norm");
    parallel_for(args.rows, std::max<std::int64_t>(kRowGrain / args.columns, 1),
                 [&](std::int64_t begin, std::int64_t end) { forward_rows<T>(args, begin, end, weight.data()); });
  });
}

void rms_norm_backward(Cpu, const RMSNormBackward& args) {
  const std::int64_t n = args.columns;
  const std::int64_t blocks = row_blocks(args.rows, n);
  on_dtype(FloatTypes{}, args.x.dtype(), "rms_norm", [&]<class T>() {
    using S = Accumulate<T>;
    const Buffer<S> weight = parameter<T>(args.weight, n, 1, "rms_norm");
    const Tensor scratch = args.dweight.defined() ? empty({blocks, n}, dtype_of<S>) : Tensor{};
    S* const dweights = scratch.data_or_null<S>();
    const std::int64_t grain = std::max<std::int64_t>(kRowGrain * blocks / (args.rows * n), 1);
    parallel_for(blocks, grain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t block = begin; block < end; ++block) {
        S* const dweight = dweights == nullptr ? nullptr : dweights + block * n;
        if (dweight != nullptr) {
          std::fill_n(dweight, n, S(0));
        }
        backward_rows<T>(args, args.rows * block / blocks, args.rows * (block + 1) / blocks, weight.data(), dweight);
      }
    });
    sum_partials<T>(args.dweight, dweights, blocks, "rms_norm");
  });
}

}  // namespace mica::kernels

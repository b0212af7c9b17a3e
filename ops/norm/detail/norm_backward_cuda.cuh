#pragma once

// What the CUDA kernels of a norm's backward share. T is the type of x, dy and dx, W that of the parameters, S that of
// sums: float, or double for double.

#include <cstddef>
#include <cstdint>
#include <utility>

#include <mica/core/rng.h>
#include <mica/core/tensor.h>
#include <mica/ops/detail/rows_cuda.cuh>
#include <mica/ops/norm/detail/norm_backward.h>
#include <mica/ops/norm/detail/norm_backward_plan.h>

namespace mica::kernels::norm_cuda {

using namespace rows;

/// What differs between the norms' gradients.
template <bool kCentered_, GradientSource kSource_>
struct NormBackwardPolicy {
  static constexpr bool kCentered = kCentered_;  // x̂ = (x − mean) · rstd, and there may be a bias; else x · rstd
  static constexpr GradientSource kSource = kSource_;
  static constexpr bool kAdds = kSource != GradientSource::y;  // dsum to dx
  static constexpr bool kDrops = kSource == GradientSource::y_and_dropped_sum;
  static constexpr int kMatrices = kAdds ? 3 : 2;  // that are read: x, dy, dsum
};

/// What forward has found out about a row.
template <class T, bool kCentered>
struct Statistics {
  using S = Accumulate<T>;
  S mean;
  S rstd;
  S mean_rest;

  __device__ S x_hat(S x) const {
    if constexpr (!kCentered) {
      return x * rstd;
    } else if constexpr (has_mean_rest(sizeof(T))) {
      return fma(x - mean, rstd, mean_rest);
    } else {
      return (x - mean) * rstd;
    }
  }
};

/// The kernels' arguments. Outputs may be null: not wanted.
template <class T, class W>
struct BackwardRows {
  using S = Accumulate<T>;
  std::int64_t rows;
  std::int64_t columns;
  const T* dy;
  const T* x;
  const W* weight;     // null: 1
  const S* mean;       // not if x̂ is not centered
  const S* mean_rest;  // null: 0
  const S* rstd;
  T* dx;          // (M, N)
  W* dweight;     // (N)
  W* dbias;       // (N)
  const T* dsum;  // (M, N)
  T* dx_dropped;  // (M, N)
  T* dx_bias;     // (N)
  PhiloxKey key;  // of the dropout
  std::uint32_t threshold;
  float scale;
  S* dweights = nullptr;   // (G, N), partial sums
  S* dbiases = nullptr;    // (G, N)
  S* dx_biases = nullptr;  // (G, N)

  /// Those that are read.
  template <int i>
  __device__ const T* matrix() const {
    if constexpr (i == 0) {
      return x;
    } else if constexpr (i == 1) {
      return dy;
    } else {
      return dsum;
    }
  }

  /// Zeros for a row that is not `present`.
  template <bool kCentered>
  __device__ Statistics<T, kCentered> statistics(std::int64_t row, bool present = true) const {
    Statistics<T, kCentered> result{};
    if (present) {
      result.rstd = rstd[row];
      if constexpr (kCentered) {
        result.mean = mean[row];
        if constexpr (has_mean_rest(sizeof(T))) {
          result.mean_rest = mean_rest != nullptr ? mean_rest[row] : S(0);
        }
      }
    }
    return result;
  }
};

// On the host.

/// partials: those of allocate_partials(), or undefined.
template <class T, class W>
BackwardRows<T, W> rows_of(const NormBackward& args, const Tensor& partials) {
  using S = Accumulate<T>;
  S* next = partials.data_or_null<S>();
  const auto partials_of = [&](const Tensor& result) -> S* {
    const bool wanted = next != nullptr && result.defined();
    return wanted ? std::exchange(next, next + partials.numel() / partials.size(0)) : nullptr;
  };
  return {.rows = args.rows,
          .columns = args.columns,
          .dy = args.dy.data_or_null<T>(),
          .x = args.x.data_or_null<T>(),
          .weight = args.weight.data_or_null<W>(),
          .mean = args.mean.data_or_null<S>(),
          .mean_rest = mean_rest_of<S>(args.mean),
          .rstd = args.rstd.data_or_null<S>(),
          .dx = args.dx.data_or_null<T>(),
          .dweight = args.dweight.data_or_null<W>(),
          .dbias = args.dbias.data_or_null<W>(),
          .dsum = args.dsum.data_or_null<T>(),
          .dx_dropped = args.dx_dropped.data_or_null<T>(),
          .dx_bias = args.dx_bias.data_or_null<T>(),
          .key = args.dropout.key,
          .threshold = args.dropout.threshold,
          .scale = static_cast<float>(args.dropout.scale()),
          .dweights = partials_of(args.dweight),
          .dbiases = partials_of(args.dbias),
          .dx_biases = partials_of(args.dx_bias)};
}

/// The tensor whose dtype is the parameters'.
inline const Tensor& parameter_of(const NormBackward& args) {
  return args.weight.defined()    ? args.weight
         : args.dweight.defined() ? args.dweight
         : args.dbias.defined()   ? args.dbias
                                  : args.x;
}

/// Calls f.operator()<kCentered, T, W>(). There are kernels for elements of up to so many bytes.
template <std::size_t kMostBytes, class F>
void on_norm(const NormBackward& args, const F& f) {
  on_row_types(args.x.dtype(), parameter_of(args).dtype(), "norm", [&]<class T, class W>() {
    if constexpr (sizeof(T) <= kMostBytes) {
      args.centered ? f.template operator()<true, T, W>() : f.template operator()<false, T, W>();
    } else {
      check(false, "norm_backward: there is no such kernel for elements of {} bytes", sizeof(T));
    }
  });
}

/// Memory for G rows of partials of each sum over rows that is wanted; undefined if none is.
Tensor allocate_partials(const NormBackward& args, std::int64_t partial_rows);

/// Stage 2: dweight, dbias and dx_bias, those that are wanted, from the partials, if there are some.
void add_partials(const NormBackward& args, const Tensor& partials);

/// dweight and dbias, those that are wanted, without dx.
void backward_parameters(const NormBackward& args);

/// Stage 1 with rows that stream through shared memory: dx, and partials as planned. Of sums, too.
void backward_streamed(const NormBackward& args, const NormBackwardPlan& plan, const Tensor& partials);
void backward_streamed_sum(const NormBackward& args, const NormBackwardPlan& plan, const Tensor& partials);

/// Stage 1 with rows that do not: dx, and partials as planned; with rows of any length, dx alone.
void backward_not_streamed(const NormBackward& args, const NormBackwardPlan& plan, const Tensor& partials);

}  // namespace mica::kernels::norm_cuda

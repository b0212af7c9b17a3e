#pragma once

// Shared by the CUDA kernels of a norm's backward. T is the type of x, dy and dx, W that of weight and bias, and S that
// of sums: float, or double if T is double.

#include <cstddef>
#include <cstdint>
#include <utility>

#include <mica/core/rng.h>
#include <mica/core/tensor.h>
#include <mica/ops/norm/detail/norm_backward.h>
#include <mica/ops/norm/detail/norm_backward_plan.h>
#include <mica/ops/rows/detail/rows_cuda.cuh>

namespace mica::kernels::norm_cuda {

using namespace rows;

/// The differences between the norms' backward kernels.
template <bool kCentered_, bool kAdds_>
struct NormBackwardPolicy {
  static constexpr bool kCentered = kCentered_;  // x̂ = (x − mean) · rstd, and there may be a bias; else x · rstd
  static constexpr bool kAdds = kAdds_;          // adds dsum to dx, to which dropout may be applied as well
  static constexpr int kMatrices = kAdds ? 3 : 2;  // matrices that are read: x, dy and, if kAdds, dsum
};

/// What forward has computed for a row.
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

/// The kernels' arguments. Outputs that are not wanted are null.
template <class T, class W>
struct BackwardRows {
  using S = Accumulate<T>;
  std::int64_t rows;
  std::int64_t columns;
  const T* dy;
  const T* x;
  const W* weight;     // null: 1
  const S* mean;       // null if x̂ is not centered
  const S* mean_rest;  // null: 0
  const S* rstd;
  T* dx;                 // (M, N)
  W* dweight;            // (N)
  W* dbias;              // (N)
  const T* dsum;         // (M, N)
  T* dx_dropped;         // (M, N); null without dropout
  T* dx_bias;            // (N)
  std::uint64_t policy;  // for loads, of the L2 cache
  PhiloxKey key;         // for dropout, like threshold and scale
  std::uint32_t threshold;
  float scale;
  S* dweights = nullptr;   // (G, N), partial sums
  S* dbiases = nullptr;    // (G, N)
  S* dx_biases = nullptr;  // (G, N)

  /// Matrix number i of those that are read.
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

  /// The statistics of a row; zeros if it is not `present`.
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
  /// The same for kernels of both norms: the mean is 0 if x̂ is not centered.
  __device__ Statistics<T, true> any_statistics(std::int64_t row, bool present = true) const {
    if (mean != nullptr) {
      return statistics<true>(row, present);
    }
    return {.mean = 0, .rstd = present ? rstd[row] : S(0), .mean_rest = 0};
  }
};

// On the host.

/// `partials` is the result of allocate_partials(), or undefined.
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
          // Measured on an H200: in backward, evict_last is faster from this size on.
          .policy = args.x.bytes() > std::size_t{12} << 20 ? cuda::kEvictLast : cuda::kEvictUnchanged,
          .key = args.dropout.key,
          .threshold = args.dropout.threshold,
          .scale = static_cast<float>(args.dropout.scale()),
          .dweights = partials_of(args.dweight),
          .dbiases = partials_of(args.dbias),
          .dx_biases = partials_of(args.dx_bias)};
}

/// A tensor that has the parameters' dtype.
inline const Tensor& parameter_of(const NormBackward& args) {
  return args.weight.defined()    ? args.weight
         : args.dweight.defined() ? args.dweight
         : args.dbias.defined()   ? args.dbias
                                  : args.x;
}

/// Calls f.operator()<kCentered, T, W>(). Throws Error for elements of more than kMostBytes bytes, for which there is
/// no kernel.
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

/// Allocates G rows of partial sums for each of dweight, dbias and dx_bias that is wanted. Undefined if none is wanted.
Tensor allocate_partials(const NormBackward& args, std::int64_t partial_rows);

/// Stage 2: computes those of dweight, dbias and dx_bias that are wanted from their partial sums. Does nothing if
/// `partials` is undefined.
void add_partials(const NormBackward& args, const Tensor& partials);

/// Computes dweight and dbias, or the one of them that is wanted, without dx.
void backward_parameters(const NormBackward& args);

/// Stage 1 for rows that stream through shared memory: computes dx and the partial sums. The second function does so
/// for the norm of a sum.
void backward_streamed(const NormBackward& args, const NormBackwardPlan& plan, const Tensor& partials);
void backward_streamed_sum(const NormBackward& args, const NormBackwardPlan& plan, const Tensor& partials);

/// Stage 1 for rows in registers: computes dx and the partial sums.
void backward_in_registers(const NormBackward& args, const NormBackwardPlan& plan, const Tensor& partials);

/// Computes dx of rows of any length.
void backward_looped(const NormBackward& args);

}  // namespace mica::kernels::norm_cuda

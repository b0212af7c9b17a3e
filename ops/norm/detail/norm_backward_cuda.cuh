#pragma once

// What the CUDA kernels of a norm's backward share. T is the type of x, dy and dx, W that of the parameters, S that of
// sums: float, or double for double.

#include <cstdint>

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

/// Memory for G rows of those partials that are wanted; a has the pointers. Undefined: none are.
template <class T, class W>
Tensor allocate_partials(BackwardRows<T, W>& a, std::int64_t partial_rows, Device device);

/// Stage 2: dweight, dbias and dx_bias, those that are wanted, from G rows of partials.
template <class T, class W>
void add_partials(const BackwardRows<T, W>& a, std::int64_t partial_rows);

/// dweight and dbias, those that are wanted, without dx.
template <bool kCentered, class T, class W>
void backward_parameters(BackwardRows<T, W> a, Device device);

/// Stage 1 with rows that stream through shared memory: dx, and partials as planned.
template <class Policy, class T, class W>
void backward_streamed(const BackwardRows<T, W>& a, const NormBackwardPlan& plan);

/// Stage 1 with rows that do not: dx, and partials as planned; with rows of any length, dx alone.
template <bool kCentered, class T, class W>
void backward_not_streamed(const BackwardRows<T, W>& a, const NormBackwardPlan& plan);

}  // namespace mica::kernels::norm_cuda

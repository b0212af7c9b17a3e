#pragma once

// Shared by forward's CUDA kernels. T is the type of x and y, W that of weight and bias, and S that of sums: float, or
// double if T is double. V is the number of columns in a pack, and P is the number of packs of a row that a thread has.

#include <cstdint>
#include <type_traits>

#include <mica/ops/norm/detail/norm_forward.h>
#include <mica/ops/norm/detail/norm_forward_plan.h>
#include <mica/ops/norm/detail/norm_moments_cuda.cuh>
#include <mica/ops/rows/detail/rows_cuda.cuh>

namespace mica::kernels::norm_cuda {

using namespace rows;

// The kind of norm, as one template argument of the kernels. With kAdds, they compute, write and normalize the sum
// residual + dropped(x + x_bias).
template <bool kCentered_, bool kAdds_ = false>
struct Norm {
  static constexpr bool kCentered = kCentered_;
  static constexpr bool kAdds = kAdds_;
};

template <class T, class W>
struct Forward {
  using S = Accumulate<T>;
  std::int64_t rows;
  std::int64_t columns;
  const T* x;
  const W* weight;  // null: 1
  const W* bias;    // null: 0
  S eps;
  S in_row;  // 1 / columns
  T* y;
  S* mean;  // null if not wanted or not centered; then mean_rest is null, too
  S* mean_rest;
  S* rstd;               // null if not wanted; then mean is null, too
  std::uint64_t policy;  // for loads of x, of the L2 cache
};

// The operands of sums, apart from Forward, so that kernels for x have fewer arguments.
template <class T>
struct Addends {
  const T* residual;
  const T* x_bias;  // null: 0
  T* sum;
  PhiloxKey key;            // for dropout
  std::uint32_t threshold;  // 0: no dropout
  float scale;
};
struct NoAddends {};
template <class N, class T>
using AddendsOf = std::conditional_t<N::kAdds, Addends<T>, NoAddends>;

/// Returns the arguments for `rows` rows from row `begin` on.
template <class T, class W>
Forward<T, W> rows_of(Forward<T, W> a, std::int64_t begin, std::int64_t rows) {
  const auto advance = [&](auto*& matrix, std::int64_t by) { matrix = matrix == nullptr ? nullptr : matrix + by; };
  a.rows = rows;
  advance(a.x, begin * a.columns);
  advance(a.y, begin * a.columns);
  advance(a.mean, begin);
  advance(a.mean_rest, begin);
  advance(a.rstd, begin);
  return a;
}

/// Writes the statistics of a row, given those of the row times `scale`: mean, its rounding error `rounding`, and rstd.
template <class N, class T, class W, class S>
__device__ void write_statistics(const Forward<T, W>& a, std::int64_t row, S mean, S rounding, S rstd, S scale) {
  if constexpr (N::kCentered) {
    if (a.mean != nullptr) {
      a.mean[row] = mean * (scale == 1 ? S(1) : S(1) / kShrink<S>);
      a.rstd[row] = rstd * scale;
      if constexpr (has_mean_rest(sizeof(T))) {
        a.mean_rest[row] = rounding * rstd;
      }
    }
  } else if (a.rstd != nullptr) {
    a.rstd[row] = rstd;
  }
}

// The moments of a row whose squares overflow, or that is not finite, times kShrink and relative to `shift`. kLanes
// lanes read the whole row from memory, add up in double, and all get the same bits.
template <int kLanes, class T, class S>
__device__ MeanAndSquares<S> shrunk_moments(const T* x_row, std::int64_t columns, S shift, S in_row) {
  double mean = 0;
  double sum = 0;
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {  // the mean, the squares
    mean = sum * in_row;
    sum = 0;
#pragma unroll 4
    for (std::int64_t column = threadIdx.x % kLanes; column < columns; column += kLanes) {
      const double difference = fma(static_cast<S>(x_row[column]), kShrink<S>, -shift) - mean;
      sum += pass == 0 ? difference : difference * difference;
    }
    sum = sum_lanes<kLanes>(sum);
  }
  return {static_cast<S>(mean), static_cast<S>(sum)};
}

/// Computes such a row without barriers, and by few registers, so that other rows do not pay for these rare ones.
/// @param mine         whether it is the thread's own row, and not only that of other lanes of its warp
/// @param first        whether the thread writes the row's statistics
/// @param for_columns  calls its argument with each column that the thread writes
template <class N, int kLanes, class T, class W, class S, class F>
__device__ void write_shrunk_row(const Forward<T, W>& a, const T* x_row, std::int64_t row, S eps, bool mine, bool first,
                                 const F& for_columns) {
  const S shift = static_cast<S>(x_row[0]) * kShrink<S>;
  const MeanAndSquares<S> m = shrunk_moments<kLanes>(x_row, a.columns, shift, a.in_row);
  if (!mine) {
    return;  // the lane was needed only for the shuffles
  }
  const S rstd = rsqrt(m.squares * a.in_row + eps * kShrink<S> * kShrink<S>);
  for_columns([&](std::int64_t column) {
    const S x = fma(static_cast<S>(x_row[column]), kShrink<S>, -shift);
    const S w = a.weight == nullptr ? S(1) : static_cast<S>(a.weight[column]);
    const S b = a.bias == nullptr ? S(0) : static_cast<S>(a.bias[column]);
    a.y[row * a.columns + column] = static_cast<T>(fma((x - m.mean) * rstd, w, b));
  });
  if (first) {
    write_statistics<N>(a, row, shift + m.mean, mean_rounding(shift, m.mean), rstd, kShrink<S>);
  }
}

// On the host.

template <class T, class W>
Forward<T, W> rows_of(const NormForward& args) {
  using S = Accumulate<T>;
  return {
      .rows = args.rows,
      .columns = args.columns,
      .x = args.x.data<T>(),
      .weight = args.weight.data_or_null<W>(),
      .bias = args.bias.data_or_null<W>(),
      .eps = static_cast<S>(args.eps),
      .in_row = S(1) / static_cast<S>(args.columns),
      .y = args.y.data<T>(),
      .mean = args.mean.data_or_null<S>(),
      .mean_rest = mean_rest_of<S>(args.mean),
      .rstd = args.rstd.data_or_null<S>(),
      .policy = cuda::read_once_policy((args.residual.defined() ? 2 : 1) * static_cast<std::int64_t>(args.x.bytes()))};
}

/// The dtype of weight and bias; if both are undefined, that of x.
inline DType parameter_type(const NormForward& args) {
  return (args.weight.defined() ? args.weight : args.bias.defined() ? args.bias : args.x).dtype();
}

/// Calls f.operator()<N>(arguments) with N the kind of norm, of x, and the arguments as a Forward<T, W>. Throws
/// Error if elements of x have more than kMostBytes bytes, since there are no kernels for them.
template <std::size_t kMostBytes, class F>
void on_norm(const NormForward& args, const F& f) {
  on_row_types(args.x.dtype(), parameter_type(args), "norm", [&]<class T, class W>() {
    if constexpr (sizeof(T) <= kMostBytes) {
      const Forward<T, W> a = rows_of<T, W>(args);
      args.centered ? f.template operator()<Norm<true>>(a) : f.template operator()<Norm<false>>(a);
    } else {
      check(false, "norm: there is no such kernel for elements of {} bytes", sizeof(T));
    }
  });
}

/// Returns `parameter` if it is aligned to 16 bytes, which kernels load at once; otherwise an aligned copy.
Tensor at_packs(const Tensor& parameter);

/// Like on_norm(), but weight and bias are aligned to 16 bytes.
template <std::size_t kMostBytes, class F>
void on_norm_with_packs(const NormForward& args, const F& f) {
  const Tensor weight = at_packs(args.weight);
  const Tensor bias = at_packs(args.bias);
  on_norm<kMostBytes>(args, [&]<class N, class T, class W>(Forward<T, W> a) {
    a.weight = weight.data_or_null<W>();
    a.bias = bias.data_or_null<W>();
    f.template operator()<N>(a);
  });
}

// The launchers. Each launches the kernel that the plan describes.
void forward_in_registers(const NormForward& args, const NormForwardPlan& plan);
void forward_sum_in_registers(const NormForward& args, const NormForwardPlan& plan);
void forward_short(const NormForward& args, const NormForwardPlan& plan);
void forward_looped(const NormForward& args);

}  // namespace mica::kernels::norm_cuda

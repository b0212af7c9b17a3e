#pragma once

// Softmax of rows of any length and alignment. A thread block reads each row twice.

#include <limits>

#include <mica/ops/softmax/detail/softmax_rule_cuda.cuh>

namespace mica::kernels::softmax_rows {

using held::Exchange;

constexpr int kLoopThreads = 512;
constexpr int kAhead = 4;  // elements that a thread loads before it uses them

/// Calls f(i, column, inside) for a thread's columns, in groups of kAhead, and then() after each group. i is the index
/// of the column in its group. `inside` is false past the end of the row.
template <class F, class Then>
__device__ void for_columns(std::int64_t columns, const F& f, const Then& then) {
  for (std::int64_t c = threadIdx.x; c < columns; c += kAhead * kLoopThreads) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const std::int64_t column = c + i * kLoopThreads;
      f(i, column, column < columns);
    }
    then();
  }
}

template <class T, class Rule>
__global__ void __launch_bounds__(kLoopThreads) softmax_looped(const T* x, T* y, std::int64_t columns, Rule rule) {
  using S = Accumulate<T>;
  using Found = SumExp<S, typename Rule::Power>;
  __shared__ typename Exchange<Found, Team::block>::Shared shared;
  const std::int64_t row = blockIdx.x;
  const std::int64_t seen = rule.seen(row, columns);
  x += row * columns;
  y += row * columns;

  auto found = Found::nothing();
  S values[kAhead];
  for_columns(
      seen,
      [&](int i, std::int64_t column, bool inside) {
        values[i] = inside ? rule.counted(static_cast<S>(x[column]), true) : -std::numeric_limits<S>::infinity();
      },
      [&] {
        S top = found.largest;
#pragma unroll
        for (const S value : values) {
          top = larger(top, value);
        }
        found.raise(top);
#pragma unroll
        for (const S value : values) {
          found.sum += found.power(value - top);
        }
      });
  found = Exchange<Found, Team::block>(shared).joined(found, 0);

  const S factor = rule.factor(found.sum);
  for_columns(
      columns,
      [&](int, std::int64_t column, bool inside) {
        if (inside) {
          const S result = rule.result(static_cast<S>(x[column]), found.largest, factor);
          y[column] = static_cast<T>(rule.seen_or_zero(result, column < seen));
        }
      },
      [] {});
}

template <class T, class Rule>
__global__ void __launch_bounds__(kLoopThreads)
    softmax_backward_looped(const T* y, const T* dy, T* dx, std::int64_t columns, Rule rule) {
  using S = Accumulate<T>;
  using Found = PlainSum<S>;
  __shared__ typename Exchange<Found, Team::block>::Shared shared;
  const std::int64_t row = blockIdx.x;
  const std::int64_t seen = rule.seen(row, columns);
  y += row * columns;
  dy += row * columns;
  dx += row * columns;

  auto found = Found::nothing();
  for_columns(
      seen,
      [&](int, std::int64_t column, bool inside) {
        found.sum += inside ? Rule::term(static_cast<S>(y[column]), static_cast<S>(dy[column])) : S{0};
      },
      [] {});
  const S sum = Exchange<Found, Team::block>(shared).joined(found, 0).sum;

  for_columns(
      columns,
      [&](int, std::int64_t column, bool inside) {
        if (inside) {
          const S result = rule.gradient(static_cast<S>(y[column]), static_cast<S>(dy[column]), sum);
          dx[column] = static_cast<T>(rule.seen_or_zero(result, column < seen));
        }
      },
      [] {});
}

}  // namespace mica::kernels::softmax_rows

#pragma once

// Functions of one contiguous row on the CPU. Included by *_cpu.cpp only.

#include <algorithm>

#include <mica/core/math.h>
#include <mica/ops/reduce/detail/cascade.h>
#include <mica/ops/reduce/detail/reduce_cpu.h>
#include <mica/ops/reduce/detail/reductions.h>

namespace mica::kernels {

inline constexpr std::int64_t kRowLeaf = 4096;

/// The largest element; NaN if any element is NaN.
template <class T>
Accumulate<T> row_max(const T* x, std::int64_t n) {
  using Op = ExtremeOp<T, true>;
  return detail::reduce_leaf<true>(Op{}, x, 1, n, 0, 0);
}

/// Σ f(i) for i < n, in a fixed order that vectorizes.
template <class V, class F>
V row_sum(std::int64_t n, const F& f) {
  constexpr int kLanes = 256 / sizeof(V);
  V levels[detail::kCascadeLevels];
  levels[0] = 0;
  detail::Cascade cascade(levels, 1, [](V* left, const V* right) { *left += *right; });
  for (std::int64_t begin = 0; begin < n; begin += kRowLeaf) {
    const std::int64_t end = std::min(n, begin + kRowLeaf);
    V lanes[kLanes] = {};
    std::int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      MICA_INDEPENDENT
      for (int lane = 0; lane < kLanes; ++lane) {
        lanes[lane] += f(i + lane);
      }
    }
    for (int lane = 0; i + lane < end; ++lane) {
      lanes[lane] += f(i + lane);
    }
    for (int width = kLanes / 2; width > 0; width /= 2) {
      for (int lane = 0; lane < width; ++lane) {
        lanes[lane] += lanes[lane + width];
      }
    }
    *cascade.next() = lanes[0];
    cascade.push();
  }
  cascade.finish();
  return levels[0];
}

/// Σ exp(x - largest)
template <class T>
Accumulate<T> row_sum_exp(const T* x, std::int64_t n, Accumulate<T> largest) {
  using V = Accumulate<T>;
  return row_sum<V>(n, [=](std::int64_t i) { return math::exp(static_cast<V>(x[i]) - largest); });
}

}  // namespace mica::kernels

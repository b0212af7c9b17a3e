#pragma once

// The arithmetic in which softmax, log_softmax and the masked softmax of attention differ, and, on top of it, forward
// and backward: what they read, what they reduce, and what they write.

#include <cstdint>
#include <limits>

#include <mica/ops/rows/detail/row_group.cuh>
#include <mica/ops/rows/detail/row_tile.cuh>
#include <mica/ops/rows/detail/rows_cuda.cuh>
#include <mica/ops/rows/detail/sum_exp.cuh>
#include <mica/ops/softmax/detail/softmax_plan.h>

namespace mica::kernels::softmax_rows {

using rows::Pack;

enum class Kind {
  softmax,
  log_softmax,
  masked,  // softmax(x · scale) over the first columns of a row; the other results, and rows of −∞, are 0
};

/// The compiler may not fuse this product with the subtraction of the largest one: the power of the largest element
/// would no longer be 1.
__device__ inline float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double rounded_product(double a, double b) { return __dmul_rn(a, b); }

template <class T, Kind kKind>
struct SoftmaxRule {
  using S = Accumulate<T>;
  static constexpr bool kLog = kKind == Kind::log_softmax;
  static constexpr bool kMasked = kKind == Kind::masked;

  // For masked rows only.
  S scale = 1;
  bool causal = false;
  std::int64_t queries = 1;  // rows of each head's matrix of scores
  std::int64_t offset = 0;   // if causal, row i of a matrix ends after column i + offset

  /// The number of columns of a row that are not masked.
  __device__ std::int64_t seen(std::int64_t row, std::int64_t columns) const {
    if constexpr (kMasked) {
      return causal ? max(std::int64_t{0}, min(row % queries + 1 + offset, columns)) : columns;
    } else {
      return columns;
    }
  }
  /// The value whose softmax is computed: x or, in masked rows, x · scale, and −∞ unless `inside`.
  __device__ S counted(S x, bool inside) const {
    if constexpr (kMasked) {
      return inside ? rounded_product(x, scale) : -std::numeric_limits<S>::infinity();
    } else {
      return x;
    }
  }
  __device__ static S seen_or_zero(S x, bool inside) { return !kMasked || inside ? x : S{0}; }
};

/// The matrices of a kernel, each (rows, columns): x → y, or y, dy → dx.
template <class T, int kInputs_>
struct Matrices {
  static constexpr int kInputs = kInputs_;
  const T* in[kInputs];
  T* out;
};

// Kernels are templates of a direction, Forward or Backward, which has:
//     Found                            what is reduced over a row, and how its parts are combined
//     add(found, elements, inside)     adds those of several elements for which inside(i) to a part's reduction
//     prepared(found)                  a number computed from the row's reduction once
//     write(element, found, prepared)  an element of the result
// An element consists of those of all inputs.

template <class T_, Kind kKind>
struct Forward : SoftmaxRule<T_, kKind> {
  using T = T_;
  using S = Accumulate<T>;
  using SoftmaxRule<T, kKind>::kLog;
  using SoftmaxRule<T, kKind>::kMasked;
  using SoftmaxRule<T, kKind>::counted;
  // Whether powers are computed as 2^(x · log₂e − shift), which saves an instruction.
  static constexpr bool kScaled = sizeof(T) == 2 && !kLog;
  using Power = std::conditional_t<kScaled, BinaryPower, NaturalPower<T>>;
  using Inputs = Matrices<T, 1>;
  using Element = Pack<S, 1>;      // x
  using Found = SumExp<S, Power>;  // the shift of the largest element, and the sum of powers
  static constexpr bool kBackward = false;
  static constexpr S kAbsent = -std::numeric_limits<S>::infinity();  // has no effect on the reduction

  /// The number that is subtracted from exponents, computed from the row's largest element.
  __device__ static S shift(S largest) {
    return kScaled ? larger(largest * kLog2E<S>, std::numeric_limits<S>::lowest()) : largest;
  }
  /// The power of a result of counted(). Power itself computes that of the difference of two shifts.
  __device__ static S power(S counted, S shift) {
    if constexpr (kScaled) {
      return Power{}(fma(counted, kLog2E<S>, -shift));
    } else {
      return Power{}(counted - shift);
    }
  }

  template <int N, class Inside>
  __device__ void add(Found& found, const Element (&elements)[N], const Inside& inside) const {
    S largest = kAbsent;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      largest = larger(largest, counted(elements[i].at[0], inside(i)));
    }
    found.raise(larger(found.largest, shift(largest)));
#pragma unroll
    for (int i = 0; i < N; ++i) {
      found.sum += inside(i) ? power(counted(elements[i].at[0], true), found.largest) : S{0};
    }
  }
  /// The factor of each power or, for log_softmax, the number that is subtracted from each x − largest.
  __device__ S prepared(const Found& found) const {
    return kLog ? math::log(found.sum) : kMasked && found.sum == S{0} ? S{0} : S{1} / found.sum;
  }
  __device__ S write(const Element& element, const Found& found, S factor) const {
    const S x = counted(element.at[0], true);
    return kLog ? x - found.largest - factor : power(x, found.largest) * factor;
  }
};

template <class T_, Kind kKind>
struct Backward : SoftmaxRule<T_, kKind> {
  using T = T_;
  using S = Accumulate<T>;
  using SoftmaxRule<T, kKind>::kLog;
  using SoftmaxRule<T, kKind>::kMasked;
  using Inputs = Matrices<T, 2>;
  using Element = Pack<S, 2>;  // y, dy
  using Found = PlainSum<S>;
  static constexpr bool kBackward = true;
  static constexpr S kAbsent = 0;

  template <int N, class Inside>
  __device__ void add(Found& found, const Element (&elements)[N], const Inside& inside) const {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const auto& [y, dy] = elements[i].at;
      found.sum += this->seen_or_zero(kLog ? dy : dy * y, inside(i));
    }
  }
  __device__ S prepared(const Found& found) const { return found.sum; }
  __device__ S write(const Element& element, const Found&, S sum) const {
    const auto& [y, dy] = element.at;
    return kLog ? dy - NaturalPower<T>{}(y)*sum : kMasked ? this->scale * y * (dy - sum) : y * (dy - sum);
  }
};

}  // namespace mica::kernels::softmax_rows

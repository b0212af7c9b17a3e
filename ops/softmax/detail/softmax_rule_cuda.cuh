#pragma once

// The arithmetic in which softmax, log_softmax and the masked softmax of attention differ.

#include <cstdint>
#include <limits>

#include <mica/ops/detail/row_team_cuda.cuh>
#include <mica/ops/detail/sum_exp_cuda.cuh>

namespace mica::kernels::softmax_rows {

using held::Place;

enum class Kind {
  softmax,
  log_softmax,
  masked,  // softmax(x · scale) over the first columns of a row; the other results, and rows of −∞, are 0
};

template <class T, Kind kKind>
struct SoftmaxRule {
  using S = Accumulate<T>;
  using Power = NaturalPower<T>;
  static constexpr bool kLog = kKind == Kind::log_softmax;
  static constexpr bool kMasked = kKind == Kind::masked;
  // Whether powers of elements in registers are computed as 2^(x · log₂e − shift), which saves an instruction.
  static constexpr bool kScaled = sizeof(T) == 2 && !kLog;
  using HeldPower = std::conditional_t<kScaled, BinaryPower, Power>;
  static constexpr int kExtraWords = kLog || kMasked ? 16 : 0;  // additional registers per thread in forward

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
  /// The number of columns of a block's part of a row that are not masked.
  template <Team kTeam>
  __device__ int seen(const Place<kTeam>& at, std::int64_t columns) const {
    if constexpr (kMasked) {
      const std::int64_t left = max(std::int64_t{0}, seen(at.row, columns) - at.begin);
      return static_cast<int>(min(left, std::int64_t{at.columns}));
    } else {
      return at.columns;
    }
  }
  /// The value whose softmax is computed: x or, in masked rows, x · scale, and −∞ unless `inside`.
  __device__ S counted(S x, bool inside) const {
    if constexpr (kMasked) {
      return inside ? x * scale : -std::numeric_limits<S>::infinity();
    } else {
      return x;
    }
  }
  __device__ static S seen_or_zero(S x, bool inside) { return !kMasked || inside ? x : S{0}; }

  /// The number that is subtracted from exponents, computed from the row's largest element.
  __device__ static S shift(S largest) {
    return kScaled ? larger(largest * kLog2E<S>, std::numeric_limits<S>::lowest()) : largest;
  }
  /// The power of an element in registers. `counted` is the result of counted(). HeldPower computes the power of the
  /// difference of two shifts.
  __device__ static S power(S counted, S shift) {
    if constexpr (kScaled) {
      return HeldPower{}(fma(counted, kLog2E<S>, -shift));
    } else {
      return HeldPower{}(counted - shift);
    }
  }

  /// The factor of each power or, for log_softmax, the number that is subtracted from each x − largest.
  __device__ S factor(S sum) const {
    if constexpr (kLog) {
      return math::log(sum);
    } else {
      return kMasked && sum == S{0} ? S{0} : S{1} / sum;
    }
  }
  __device__ S result(S x, S largest, S factor) const {
    const S distance = counted(x, true) - largest;
    return kLog ? distance - factor : Power{}(distance)*factor;
  }

  /// The same for an element in registers.
  __device__ S held_result(S x, S shift, S factor) const {
    const S value = counted(x, true);
    return kLog ? value - shift - factor : power(value, shift) * factor;
  }

  __device__ static S term(S y, S dy) { return kLog ? dy : dy * y; }
  __device__ S gradient(S y, S dy, S sum) const {
    return kLog ? dy - Power{}(y)*sum : kMasked ? scale * y * (dy - sum) : y * (dy - sum);
  }
};

}  // namespace mica::kernels::softmax_rows

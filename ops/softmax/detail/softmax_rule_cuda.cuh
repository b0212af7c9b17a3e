#pragma once

// The arithmetic in which softmax, log_softmax and the masked softmax of attention differ, and, on top of it, forward
// and backward: what they read, what they reduce, and what they write.

#include <cstdint>
#include <limits>

#include <mica/ops/rows/row_group.cuh>
#include <mica/ops/rows/row_tile.cuh>
#include <mica/ops/rows/rows_cuda.cuh>
#include <mica/ops/rows/sum_exp.cuh>
#include <mica/ops/softmax/detail/softmax_plan.h>

namespace mica::kernels::softmax_rows {

using rows::Pack;

/// The row that a block or a group of its threads works on, and the columns of it that they have.
template <Group kGroup>
struct Place {
  std::int64_t row;
  std::int64_t begin;  // the first column
  int columns;         // how many; 0: the thread has no row

  __device__ Place(const RowPlan& plan, std::int64_t rows, std::int64_t row_columns) {
    if constexpr (kGroup == Group::cluster) {
      row = blockIdx.x / plan.cluster;
      begin = std::int64_t{cuda::cluster_rank()} * plan.slab;
    } else {
      row = std::int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
      begin = 0;
    }
    const std::int64_t left = row_columns - begin;
    columns = row >= rows || left <= 0 ? 0 : static_cast<int>(left < plan.slab ? left : plan.slab);
  }
};

enum class Kind {
  softmax,
  log_softmax,
  masked,  // softmax(x · scale) over the first columns of a row; the other results, and rows of −∞, are 0
};

template <class T, Kind kKind>
struct SoftmaxRule {
  using S = Accumulate<T>;
  static constexpr bool kLog = kKind == Kind::log_softmax;
  static constexpr bool kMasked = kKind == Kind::masked;
  // Whether powers are computed as 2^(x · log₂e − shift), which saves an instruction.
  static constexpr bool kScaled = sizeof(T) == 2 && !kLog;
  using Power = std::conditional_t<kScaled, BinaryPower, NaturalPower<T>>;

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
  template <Group kGroup>
  __device__ int seen(const Place<kGroup>& at, std::int64_t columns) const {
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
  /// The power of a result of counted(). Power itself computes that of the difference of two shifts.
  __device__ static S power(S counted, S shift) {
    if constexpr (kScaled) {
      return Power{}(fma(counted, kLog2E<S>, -shift));
    } else {
      return Power{}(counted - shift);
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
  __device__ S result(S x, S shift, S factor) const {
    const S value = counted(x, true);
    return kLog ? value - shift - factor : power(value, shift) * factor;
  }

  __device__ static S term(S y, S dy) { return kLog ? dy : dy * y; }
  __device__ S gradient(S y, S dy, S sum) const {
    return kLog ? dy - NaturalPower<T>{}(y)*sum : kMasked ? scale * y * (dy - sum) : y * (dy - sum);
  }
};

/// The matrices of a kernel, each (rows, columns): x → y, or y, dy → dx.
template <class T, int kInputs_>
struct Matrices {
  static constexpr int kInputs = kInputs_;
  const T* in[kInputs];
  T* out;

  /// Moves all pointers.
  __device__ void move(std::int64_t elements) {
#pragma unroll
    for (const T*& input : in) {
      input += elements;
    }
    out += elements;
  }
};

// Kernels are templates of a direction, Forward or Backward, which has:
//     Found                            what is reduced over a row, and how its parts are combined
//     add(found, elements)             adds several elements to a part's reduction
//     prepared(found)                  a number computed from the row's reduction once
//     write(element, found, prepared)  an element of the result
// An element consists of those of all inputs.

template <class T_, Kind kKind>
struct Forward : SoftmaxRule<T_, kKind> {
  using T = T_;
  using S = Accumulate<T>;
  using Rule = SoftmaxRule<T, kKind>;
  using Inputs = Matrices<T, 1>;
  using Element = Pack<S, 1>;                     // x
  using Found = SumExp<S, typename Rule::Power>;  // the shift of the largest element, and the sum of powers
  static constexpr bool kBackward = false;
  static constexpr S kAbsent = -std::numeric_limits<S>::infinity();  // has no effect on the reduction

  template <int N>
  __device__ void add(Found& found, const Element (&elements)[N]) const {
    S largest = this->counted(elements[0].at[0], true);
#pragma unroll
    for (int i = 1; i < N; ++i) {
      largest = larger(largest, this->counted(elements[i].at[0], true));
    }
    found.raise(larger(found.largest, Rule::shift(largest)));
#pragma unroll
    for (const Element& element : elements) {
      found.sum += Rule::power(this->counted(element.at[0], true), found.largest);
    }
  }
  __device__ S prepared(const Found& found) const { return this->factor(found.sum); }
  __device__ S write(const Element& element, const Found& found, S factor) const {
    return this->result(element.at[0], found.largest, factor);
  }
};

template <class T_, Kind kKind>
struct Backward : SoftmaxRule<T_, kKind> {
  using T = T_;
  using S = Accumulate<T>;
  using Rule = SoftmaxRule<T, kKind>;
  using Inputs = Matrices<T, 2>;
  using Element = Pack<S, 2>;  // y, dy
  using Found = PlainSum<S>;
  static constexpr bool kBackward = true;
  static constexpr S kAbsent = 0;

  template <int N>
  __device__ void add(Found& found, const Element (&elements)[N]) const {
#pragma unroll
    for (const Element& element : elements) {
      found.sum += Rule::term(element.at[0], element.at[1]);
    }
  }
  __device__ S prepared(const Found& found) const { return found.sum; }
  __device__ S write(const Element& element, const Found&, S sum) const {
    return this->gradient(element.at[0], element.at[1], sum);
  }
};

}  // namespace mica::kernels::softmax_rows

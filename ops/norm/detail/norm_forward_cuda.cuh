#pragma once

// Shared by forward's CUDA kernels. T is the type of x and y, W that of weight and bias, and S that of sums: float, or
// double if T is double. V is the number of columns in a pack, and P is the number of packs of a row that a thread has.

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include <mica/ops/detail/rows_cuda.cuh>
#include <mica/ops/norm/detail/norm_forward.h>
#include <mica/ops/norm/detail/norm_forward_plan.h>

namespace mica::kernels::norm_cuda {

using namespace rows;

// What is normalized: x, or the sum residual + x + x_bias, with or without dropout of x + x_bias. Sums are also
// written.
enum class Source { x, sum, dropped_sum };

// The kind of norm and its source, as one template argument of the kernels.
template <bool kCentered_, Source kSource_ = Source::x>
struct Norm {
  static constexpr bool kCentered = kCentered_;
  static constexpr Source kSource = kSource_;
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

// The operands of sums, for Source::sum and Source::dropped_sum. They are a separate struct, so that kernels for x have
// fewer arguments.
template <class T>
struct Addends {
  const T* residual;
  const T* x_bias;  // null: 0
  T* sum;
  PhiloxKey key;
  std::uint32_t threshold;
  float scale;
};
struct NoAddends {};
template <class N, class T>
using AddendsOf = std::conditional_t<N::kSource == Source::x, NoAddends, Addends<T>>;

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

// Moments of some elements relative to a shift that is close to them. They are computed in one of two ways:
//
// - In one pass, for 16-bit elements: a = Σ (x − shift) and b = Σ (x − shift)². With the mean of the row's first 8
//   elements as the shift, b is at most 1 + N / 8 times as large as Σ (x − mean)², which is the part of b that remains
//   in the variance. So float32 keeps far more than 16 bits of that part.
// - In two passes, for other elements: a is the mean of x − shift, and b = Σ (x − shift − a)². These are combined by
//   Chan's formula.
//
// Norms that are not centered need only b = Σ x². Their shift and a are 0.
template <class S>
struct Moments {
  S a;
  S b;
};

// Whether moments are computed in one pass.
template <class T, int V>
constexpr bool kOnePass = sizeof(T) == 2 && V > 1;

// The number of elements at the beginning of a row whose mean is the row's shift.
template <class T, int V>
constexpr int kFirst = kOnePass<T, V> ? 8 : 1;

// The shift of a row whose first elements are `first`: the mean of these elements.
template <class T, int V>
__device__ Accumulate<T> shift_of(const Pack<T, V>& first) {
  using S = Accumulate<T>;
  S values[V];
  unpack(first, values);
  S shift = 0;
#pragma unroll
  for (const S value : values) {
    shift = fma(value, S(1.0 / V), shift);
  }
  return shift;
}

template <class S>
__device__ S reciprocal(S n) {
  return n > 0 ? S(1) / n : S(0);
}

// Combines the moments of kLanes lanes by Chan's formula. `count` is the lane's number of elements, and reciprocal_n is
// 1 / their total number. All lanes get the result.
template <int kLanes, class S>
__device__ Moments<S> combine_lanes(const Moments<S>& mine, S count, S reciprocal_n) {
  const S mean = sum_lanes<kLanes>(count * mine.a) * reciprocal_n;
  const S difference = mine.a - mean;
  return {mean, sum_lanes<kLanes>(mine.b + count * difference * difference)};
}

// weight and bias of a thread's P packs of V columns, kept in registers in the dtype in which they are stored. A pack
// begins kStep columns after the previous one. With kAtOnce, all loads are issued immediately: they are relaxed, so
// that the compiler does not delay some of them until earlier loads have returned. With the scope cta, they still use
// the L1 cache, which has the rest of a sector that two loads share.
template <class W, int V, int P, int kStep, bool kAtOnce = false>
class KeptParameters {
 public:
  /// weight and bias are those of the whole row; if they are null, their elements are 1 and 0. The thread has `packs`
  /// packs, the first of which begins at column `first`.
  __device__ KeptParameters(const W* weight, const W* bias, int first, int packs) {
    load_from(weight, 1, first, packs, weights_);
    load_from(bias, 0, first, packs, biases_);
  }

  /// Returns weight and bias of pack i. `row` is any number that changes from row to row. It hides from the compiler
  /// that weight and bias are the same for each row. Otherwise the compiler would unpack pairs once, into twice as many
  /// registers.
  template <class S>
  __device__ void at(int i, int row, S (&weight)[V], S (&bias)[V]) const {
    unpack_anew(weights_[i], row, weight);
    unpack_anew(biases_[i], row, bias);
  }

 private:
  // 16-bit elements are kept as 32-bit words. After a branch, the compiler would split packs of 16-bit elements, and
  // wait for the load of each pack.
  static constexpr bool kWords = sizeof(W) == 2 && V > 1;
  using Kept = std::conditional_t<kWords, Pack<unsigned, V / (kWords ? 2 : 1)>, Pack<W, V>>;

  __device__ static Kept kept(W value) {
    Kept pack;
#pragma unroll
    for (auto& element : pack.at) {
      if constexpr (kWords) {
        element = 0x10001u * reinterpret_cast<const std::uint16_t&>(value);
      } else {
        element = value;
      }
    }
    return pack;
  }

  __device__ static Kept load_pack(const W* from) {
    Kept pack;
    if constexpr (kAtOnce) {
      static_assert(sizeof(Kept) % 16 == 0);
#pragma unroll
      for (int i = 0; i < static_cast<int>(sizeof(Kept) / 16); ++i) {
        uint4& words = reinterpret_cast<uint4*>(&pack)[i];
        asm volatile("ld.relaxed.cta.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                     : "l"(reinterpret_cast<const uint4*>(from) + i));
      }
    } else {
      pack = *reinterpret_cast<const Kept*>(from);
    }
    return pack;
  }

  __device__ static void load_from(const W* parameter, float absent, int first, int count, Kept (&packs)[P]) {
#pragma unroll
    for (Kept& pack : packs) {
      pack = kept(static_cast<W>(absent));
    }
    if (parameter != nullptr) {  // one test for all packs, so that no load waits for a branch
#pragma unroll
      for (int i = 0; i < P; ++i) {
        if (i < count) {
          packs[i] = load_pack(parameter + first + i * kStep);
        }
      }
    }
  }

  template <class S>
  __device__ static void unpack_anew(Kept kept, int row, S (&values)[V]) {
    if constexpr (kWords && V == 2) {
      asm("" : "+r"(kept.at[0]) : "r"(row));
    }
    unpack(reinterpret_cast<const Pack<W, V>&>(kept), values);
  }

  Kept weights_[P];
  Kept biases_[P];
};

// weight and bias in shared memory, in parts of 16 bytes. 32 packs of V columns become V / kPart runs of 32 parts, one
// part of each pack, so that neighboring lanes read adjacent parts. A thread's packs are kLanes packs apart.
template <class W, int V, int kLanes, bool kBias>
class SharedParameters {
 public:
  static constexpr int kPart = 16 / sizeof(W);

  /// All threads of the block call it with the same `memory`, and then synchronize. A thread's first column is `first`.
  __device__ SharedParameters(const W* weight, const W* bias, int first, int columns, unsigned char* memory)
      : weight_(reinterpret_cast<W*>(memory) + place(first)), bias_(weight_ + padded(columns)) {
    W* const shared = reinterpret_cast<W*>(memory);
    const int thread = threadIdx.y * blockDim.x + threadIdx.x;
    const int threads = blockDim.x * blockDim.y;
#pragma unroll 1
    for (int column = thread * kPart; column < columns; column += threads * kPart) {
      store(shared + place(column), load_or<kPart>(weight, column, 1));
      if constexpr (kBias) {
        store(shared + padded(columns) + place(column), load_or<kPart>(bias, column, 0));
      }
    }
  }

  static int bytes(int columns) { return (kBias ? 2 : 1) * padded(columns) * static_cast<int>(sizeof(W)); }

  __device__ bool both() const { return true; }

  /// Returns weight and bias of pack i, kPart columns from its column `part` on.
  template <bool, class S>
  __device__ void at(int i, int part, S (&w)[kPart], S (&b)[kPart]) const {
    const int packs = i * kLanes;
    const int from = packs / kWarp * (kWarp * V) + packs % kWarp * kPart + part / kPart * (kWarp * kPart);
    unpack(load<kPart>(weight_ + from), w);
    if constexpr (kBias) {
      unpack(load<kPart>(bias_ + from), b);
    }
  }

 private:
  static __host__ __device__ int padded(int columns) { return (columns + kWarp * V - 1) / (kWarp * V) * (kWarp * V); }

  // The index in shared memory of the part that begins at `column`.
  __device__ static int place(int column) {
    const int pack = column / V;
    return pack / kWarp * (kWarp * V) + column % V / kPart * (kWarp * kPart) + pack % kWarp * kPart;
  }

  const W* weight_;
  const W* bias_;
};

/// Writes a row's statistics. The row was multiplied by `scale`. `mean`, its rounding error `rounding`, and `rstd` are
/// those of the scaled row.
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

// The moments of a row whose squares overflow, or that is not finite. The row is read from memory, multiplied by
// kShrink, and taken relative to `shift`. kLanes lanes compute all of it by themselves, with the same bits in each
// lane. Such rows are rare, and must not cost other rows barriers or registers. A lane has many elements, so its sums
// are double.
template <int kLanes, class T, class S>
__device__ Moments<S> shrunk_moments(const T* x_row, std::int64_t columns, S shift, S in_row) {
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

// Computes a row that is not finite, or whose squares overflow: a warp reads x again, and writes y to `y_row`. The
// moments are those of kLanes lanes.
template <class N, int kLanes, class T, class W>
__device__ void write_shrunk_row(const Forward<T, W>& a, std::int64_t row, T* y_row) {
  using S = Accumulate<T>;
  const T* const x_row = a.x + row * a.columns;
  const S shift = static_cast<S>(x_row[0]) * kShrink<S>;
  const Moments<S> m = shrunk_moments<kLanes>(x_row, a.columns, shift, a.in_row);
  const S rstd = rsqrt(m.b * a.in_row + a.eps * kShrink<S> * kShrink<S>);
  const int lane = threadIdx.x % kWarp;
#pragma unroll 1
  for (int column = lane; column < static_cast<int>(a.columns); column += kWarp) {
    const S x = fma(static_cast<S>(x_row[column]), kShrink<S>, -shift);
    const S w = a.weight == nullptr ? S(1) : static_cast<S>(a.weight[column]);
    const S b = a.bias == nullptr ? S(0) : static_cast<S>(a.bias[column]);
    y_row[column] = static_cast<T>(fma((x - m.a) * rstd, w, b));
  }
  if (lane == 0) {
    write_statistics<N>(a, row, shift + m.a, mean_rounding(shift, m.a), rstd, kShrink<S>);
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

/// The number of persistent blocks to launch, of which `resident` can run at once. With `wanted` blocks, each would
/// have a single turn. Up to 16 times as many as can run at once balance the load if some multiprocessors are slower
/// than others. But each block loads the parameters, so there are more than can run at once only if each has at least
/// `turns` turns.
inline unsigned blocks_of_turns(std::int64_t wanted, int turns, int resident) {
  const std::int64_t waves = std::clamp<std::int64_t>(wanted / turns / resident, 1, 16);
  return static_cast<unsigned>(std::min(wanted, waves * resident));
}

/// The dtype of weight and bias; if both are undefined, that of x.
inline DType parameter_type(const NormForward& args) {
  return (args.weight.defined() ? args.weight : args.bias.defined() ? args.bias : args.x).dtype();
}

/// Calls f.operator()<N>(arguments) with N the kind of norm, of Source::x, and the arguments as a Forward<T, W>. Throws
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

// The launchers. Each launches the kernel that `plan` describes.
void forward_held(const NormForward& args, const NormForwardPlan& plan);
void forward_held_sum(const NormForward& args, const NormForwardPlan& plan);
void forward_short(const NormForward& args, const NormForwardPlan& plan);
void forward_looped(const NormForward& args, const NormForwardPlan& plan);

}  // namespace mica::kernels::norm_cuda

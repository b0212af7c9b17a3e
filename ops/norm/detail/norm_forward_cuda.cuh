#pragma once

// What forward's CUDA kernels share. T is the type of x and y, W that of weight and bias, S that of sums: float, or
// double for double. V is the number of columns in a pack, P that of packs of a row that a thread has.

#include <cstdint>
#include <type_traits>

#include <mica/ops/detail/rows_cuda.cuh>
#include <mica/ops/norm/detail/norm_forward.h>
#include <mica/ops/norm/detail/norm_forward_plan.h>

namespace mica::kernels::norm_cuda {

using namespace rows;

// Where the rows come from: they are x's, or those of residual + x + x_bias, x dropped or not, which are written too.
enum class Source { x, sum, dropped_sum };

// What is done with them: a norm and its source, as one template argument of the kernels.
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
  S* mean;  // null, with mean_rest: not wanted, or not centered
  S* mean_rest;
  S* rstd;                 // null, with mean: not wanted
  bool inputs_last_in_l2;  // of what is in the L2 cache, others than x and residual are to go first

  /// Of those that are read and normalized, the only one.
  template <int>
  __device__ const T* matrix() const {
    return x;
  }
};

// What is added: of Source::sum and dropped_sum. Apart, so that the arguments of other kernels stay few.
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

/// So many rows from `begin` on.
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

// Moments of some elements relative to a shift that is near them. There are two ways to them:
//
// In one pass, for 16-bit elements: a = Σ (x − shift), b = Σ (x − shift)². With the mean of the row's first pack as the
// shift, b is at most 1 + N / V times what is left of it in the variance, so that float32 keeps far more than 16 bits
// of it. In two passes, for others: a = the mean and b = Σ (x − mean)², combined by Chan's formula. A warp of a row
// that streams takes the former to the latter.
//
// Norms that are not centered need Σ x² alone, b: their shift and their a are 0.
template <class S>
struct Moments {
  S a;
  S b;
};

// Whether moments are taken in one pass.
template <class T, int V>
constexpr bool kOnePass = sizeof(T) == 2 && V > 1;

// Elements at the beginning of a row that its shift comes from.
template <class T, int V>
constexpr int kFirst = kOnePass<T, V> ? V : 1;

// The shift of a row that begins with `first`: their mean.
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

// The moments of `count` elements in each of kLanes lanes together; all of them get them.
template <int kLanes, class S>
__device__ Moments<S> combine_lanes(const Moments<S>& mine, S count, S reciprocal_n) {
  const S mean = sum_lanes<kLanes>(count * mine.a) * reciprocal_n;
  const S difference = mine.a - mean;
  return {mean, sum_lanes<kLanes>(mine.b + count * difference * difference)};
}

// weight and bias of a thread's P packs of V columns, kept in registers as they were read. A pack begins kStep columns
// after the one before. The last pair may be cut. kAtOnce: no load is put off, as the compiler would do with some until
// what was read before has come.
template <class W, int V, int P, int kStep, bool kAtOnce = false>
class KeptParameters {
 public:
  /// weight and bias: of the row; null: 1, and 0. The thread has the first `whole` of its packs, the first one at
  /// column `first`, and if is_cut, one element of the next.
  __device__ KeptParameters(const W* weight, const W* bias, int first, int whole, bool is_cut)
      // All loads before anything waits for one of them.
      : cut_weight_(load_from(weight, 1, first, whole, is_cut, weights_)),
        cut_bias_(load_from(bias, 0, first, whole, is_cut, biases_)) {}

  /// Inserts the single element of a cut pair, which the constructor loads, into its pack. This waits for that load, so
  /// call it after other loads have been issued, and before at().
  __device__ void place_cut(int whole, bool is_cut) {
    if (V == 2 && is_cut) {
#pragma unroll
      for (int i = 0; i < P; ++i) {
        weights_[i] = i == whole ? kept(cut_weight_) : weights_[i];
        biases_[i] = i == whole ? kept(cut_bias_) : biases_[i];
      }
    }
  }

  /// Those of pack number i, for row number `row`. The compiler must not know that they are the same for each row: it
  /// would unpack pairs once, into twice as many registers.
  template <class S>
  __device__ void at(int i, int row, S (&weight)[V], S (&bias)[V]) const {
    unpack_anew(weights_[i], row, weight);
    unpack_anew(biases_[i], row, bias);
  }

 private:
  // 16-bit elements as words: where branches meet, the compiler would take packs of them apart, and wait for each.
  static constexpr bool kWords = sizeof(W) == 2;
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
        asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                     : "l"(reinterpret_cast<const uint4*>(from) + i));
      }
    } else {
      pack = *reinterpret_cast<const Kept*>(from);
    }
    return pack;
  }

  // Returns the one element of the cut pair, which is the last of the row.
  __device__ static W load_from(const W* parameter, float absent, int first, int whole, bool is_cut, Kept (&packs)[P]) {
    W last = static_cast<W>(absent);
#pragma unroll
    for (Kept& pack : packs) {
      pack = kept(last);
    }
    if (parameter != nullptr) {  // asked once, so that no load waits for a branch
#pragma unroll
      for (int i = 0; i < P; ++i) {
        if (i < whole) {
          packs[i] = load_pack(parameter + first + i * kStep);
        }
      }
      if (V == 2 && is_cut) {
        last = parameter[first + whole * kStep];
      }
    }
    return last;
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
  W cut_weight_;
  W cut_bias_;
};

/// Of a row that was scaled before; `mean`, and `rounding`, what its rounding added to it, still are.
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

// The moments of a row whose squares overflow, or that is not finite, shrunk and relative to `shift`: from memory, by
// kLanes lanes alone, to the same bits in each. Hardly any row is such, and it must not cost the others barriers or
// registers. A lane has many elements, so that sums are double.
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

// On the host.

template <class T, class W>
Forward<T, W> rows_of(const NormForward& args) {
  using S = Accumulate<T>;
  constexpr std::size_t kKeptInL2 = 40 << 20;  // bytes of results that the L2 cache has room for
  return {.rows = args.rows,
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
          // What the next kernel reads of smaller results is better found there than the inputs.
          .inputs_last_in_l2 = args.y.bytes() * (args.sum.defined() ? 2 : 1) > kKeptInL2};
}

/// The dtype of weight and bias.
inline DType parameter_type(const NormForward& args) {
  return (args.weight.defined() ? args.weight : args.bias.defined() ? args.bias : args.x).dtype();
}

/// Calls f.operator()<N>(rows) with the norm. There are kernels for elements of up to so many bytes.
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

/// The parameter, or a copy of it, of which pairs can be read at once.
Tensor at_pairs(const Tensor& parameter);

/// The same with weight and bias of which pairs can be read at once.
template <std::size_t kMostBytes, class F>
void on_norm_with_pairs(const NormForward& args, const F& f) {
  const Tensor weight = at_pairs(args.weight);
  const Tensor bias = at_pairs(args.bias);
  on_norm<kMostBytes>(args, [&]<class N, class T, class W>(Forward<T, W> a) {
    a.weight = weight.data_or_null<W>();
    a.bias = bias.data_or_null<W>();
    f.template operator()<N>(a);
  });
}

// The launchers, which carry out a plan.
void forward_held(const NormForward& args, const NormForwardPlan& plan);
void forward_held_sum(const NormForward& args, const NormForwardPlan& plan);
void forward_tiles(const NormForward& args, const NormForwardPlan& plan);
void forward_stream(const NormForward& args, const NormForwardPlan& plan);
void forward_looped(const NormForward& args, const NormForwardPlan& plan);

}  // namespace mica::kernels::norm_cuda

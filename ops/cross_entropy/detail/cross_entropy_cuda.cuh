#pragma once

// Parts of the kernels of cross entropy: the transformed logits of a row, the sums over them, and the gradient of a
// single logit. Included by *_cuda.cu only. See README.md for the notation and the derivation.
//
// The transformed logit z is span · y with span > 0: without a cap, y = x and span = s, the logit scale; with a cap,
// y = tanh(s x / cap) and span = cap. Differences of y are multiplied by span, so that large logits keep their
// precision.

#include <cstdint>
#include <limits>
#include <type_traits>

#include <mica/core/cuda/ptx.cuh>
#include <mica/core/dtype.h>
#include <mica/core/math.h>
#include <mica/ops/cross_entropy/detail/cross_entropy_kernels.h>
#include <mica/ops/rows/detail/row_group.cuh>
#include <mica/ops/rows/detail/row_loop.cuh>
#include <mica/ops/rows/detail/rows_cuda.cuh>
#include <mica/ops/rows/detail/sum_exp.cuh>

namespace mica::kernels::xent {

using Target = CrossEntropyTarget;

template <class T>
constexpr bool kNarrow = sizeof(T) == 2;  // whether the GPU's approximate functions are accurate enough
// With a cap, one of every kPolynomialEach powers is computed by a polynomial.
constexpr int kPolynomialEach = 3;

template <class T, class S>
__device__ S exp2_of(S x) {
  if constexpr (kNarrow<T>) {
    return cuda::approximate_exp2(x);
  } else if constexpr (std::is_same_v<S, float>) {
    return ::exp2f(x);
  } else {
    return ::exp2(x);
  }
}

/// 2ˣ for x ≤ 0, with a relative error of 1e-4, as 2ⁿ · 2ʳ with n = round(x). It needs no special function unit; these
/// also compute tanh, which would limit capped rows. kLow: x may be below −126.
template <bool kLow>
__device__ float exp2_by_polynomial(float x) {
  float bounded = x;
  if constexpr (kLow) {
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(bounded) : "f"(x), "f"(-126.0f));
  }
  // Adding 1.5 · 2²³ rounds to an integer, in the low bits of the mantissa.
  const float shifted = bounded + 12582912.0f;
  const float r = bounded - (shifted - 12582912.0f);
  const float p = math::detail::polynomial(r, 0.0551716691f, 0.242611122f, 0.693260985f, 0.999928074f);
  return p * __uint_as_float((__float_as_uint(shifted) << 23) + 0x3f800000u);
}

template <class T, class S>
__device__ S tanh_of(S x) {
  if constexpr (kNarrow<T>) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  } else {
    return math::tanh(x);
  }
}

/// CrossEntropyTerms as kernel arguments.
template <class T>
struct Problem {
  using S = Accumulate<T>;

  std::int64_t rows;
  std::int64_t classes;
  const T* logits;
  const T* given;      // the targets, if they are probabilities, else null
  const void* labels;  // the targets, if they are labels, else null
  bool wide_labels;    // whether labels are int64, not int32
  const S* weight;     // null: all 1
  std::int64_t ignore_index;
  S even;   // label_smoothing / V
  S sharp;  // 1 − label_smoothing
  S scale;
  S inner;     // y = inner · x or, with a cap, tanh(inner · x)
  bool flips;  // no cap and scale ≤ 0: then the largest z does not belong to the largest x, and y = z instead of x
  S span;      // z = span · y

  explicit Problem(const CrossEntropyTerms& terms)
      : rows(terms.logits.size(0)),
        classes(terms.logits.size(1)),
        logits(terms.logits.data<T>()),
        given(nullptr),
        labels(nullptr),
        wide_labels(terms.targets.dtype() == int64),
        weight(terms.weight.data_or_null<S>()),
        ignore_index(terms.ignore_index),
        even(static_cast<S>(terms.label_smoothing / static_cast<double>(terms.logits.size(1)))),
        sharp(static_cast<S>(1 - terms.label_smoothing)),
        scale(static_cast<S>(terms.logit_scale)),
        inner(static_cast<S>(terms.softcap != 0 ? terms.logit_scale / terms.softcap : 1)),
        flips(terms.softcap == 0 && terms.logit_scale <= 0),
        span(static_cast<S>(terms.softcap != 0 ? terms.softcap : terms.logit_scale)) {
    if (flips) {
      inner = scale;
      span = 1;
    }
    if (is_floating(terms.targets.dtype())) {
      given = terms.targets.data<T>();
    } else {
      labels = terms.targets.raw_data();
    }
  }

  /// The factor for which 2^(unit() · y) = eᶻ.
  __device__ S unit() const { return span * kLog2E<S>; }
  __device__ S weight_of(std::int64_t i) const { return weight != nullptr ? weight[i] : S{1}; }
};

/// The label of a row; if the targets are probabilities, there is none.
template <class T, Target kTarget>
struct Label {
  using S = Accumulate<T>;
  static constexpr std::int64_t kNone = -1;
  static constexpr std::int64_t kIgnored = -2;
  static constexpr std::int64_t kInvalid = -3;

  std::int64_t index = kNone;  // a class, or one of these
  S u = 0;                     // the part of u that only the label's class has

  __device__ Label(const Problem<T>& p, std::int64_t row) {
    if (kTarget == Target::label || p.labels != nullptr) {
      index = p.wide_labels ? static_cast<const std::int64_t*>(p.labels)[row]
                            : static_cast<const std::int32_t*>(p.labels)[row];
      if (index == p.ignore_index) {
        index = kIgnored;
      } else if (index >= 0 && index < p.classes) {
        u = p.sharp * p.weight_of(index);
      } else {
        index = kInvalid;
        u = std::numeric_limits<S>::quiet_NaN();
      }
    }
  }
  __device__ bool is_class() const { return index >= 0; }
  __device__ bool ignored() const { return index == kIgnored; }
};

/// y of a logit.
template <bool kCap, class T>
__device__ Accumulate<T> capped(const Problem<T>& p, Accumulate<T> x) {
  if constexpr (kCap) {
    return tanh_of<T>(x * p.inner);
  } else {
    return p.flips ? x * p.inner : x;
  }
}

/// The part of u of class i of a row that is not only the label's, if the target is a distribution.
template <class T>
__device__ Accumulate<T> common_u(const Problem<T>& p, std::int64_t row, std::int64_t i) {
  using S = Accumulate<T>;
  const S u = p.given != nullptr ? fma(p.sharp, static_cast<S>(p.given[row * p.classes + i]), p.even) : p.even;
  return p.weight_of(i) * u;
}

/// 2ˣ for element j of a pack; x ≤ 0 up to rounding. kLow: x may be below −126.
template <class T, bool kCap, bool kLow = true, class S>
__device__ S power_of(S x, int j) {
  if constexpr (kNarrow<T> && kCap) {
    return j % kPolynomialEach == 1 ? exp2_by_polynomial<kLow>(x) : exp2_of<T>(x);
  } else {
    return exp2_of<T>(x);
  }
}

/// 2^(unit · x), where unit is Problem::unit().
template <class T>
struct UnitPower {
  using S = Accumulate<T>;
  S unit;

  __device__ S operator()(S x) const { return exp2_of<T>(x * unit); }
};

/// The reductions over a row: the largest y and Σ 2^(unit · (y − largest)). For a distribution also Σ u and
/// Σ u (largest − y), with u from common_u(). If kInPlace, also two numbers of the leader, a thread of the row, which
/// are 0 in the other threads.
///
/// With a cap, y ≤ 1, and if the cap is so small that 2^(unit · (y − 1)) cannot underflow, 1 replaces the largest y.
template <class T, Target kTarget, bool kCap, bool kInPlace = false>
struct Found : SumExp<Accumulate<T>, UnitPower<T>> {
  using S = Accumulate<T>;
  using Base = SumExp<S, UnitPower<T>>;
  static constexpr bool kCommon = kTarget == Target::distribution;
  static constexpr int kNumbers = 2 + (kCommon ? 2 : 0) + (kInPlace ? 2 : 0);
  using Base::largest;
  using Base::power;
  using Base::sum;

  S mass;
  S distance;
  S label_y;     // y of the label
  int next_row;  // the row to process next

  __device__ static Found nothing(S unit) {
    Found found{Base::nothing({unit}), S{0}, S{0}, S{0}, 0};
    if (found.is_bounded()) {
      found.largest = 1;
    }
    return found;
  }
  __device__ Found empty() const { return nothing(power.unit); }
  template <class F>
  __device__ void for_numbers(const F& f) {
    Base::for_numbers(f);
    if constexpr (kCommon) {
      f(2, mass);
      f(3, distance);
    }
    if constexpr (kInPlace) {
      f(kNumbers - 2, label_y);
      S bits = __int_as_float(next_row);
      f(kNumbers - 1, bits);
      next_row = __float_as_int(bits);
    }
  }
  __device__ bool is_bounded() const { return kCap && power.unit <= S{60}; }

  __device__ void raise(S top) {
    if constexpr (kCommon) {
      distance += weighed(mass, top - largest);
    }
    Base::raise(top);
  }
  /// Adds several y. common(j) is u of y number j.
  template <int N, class Common>
  __device__ void add(const S (&y)[N], const Common& common) {
    if (is_bounded()) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        sum += power_of<T, kCap, /*kLow=*/false>(fma(y[j], power.unit, -power.unit), j);
      }
    } else {
      S top = largest;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        top = larger(top, y[j]);
      }
      raise(top);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        sum += power_of<T, kCap>((y[j] - largest) * power.unit, j);
      }
    }
    if constexpr (kCommon) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const S u = common(j);
        mass += u;
        distance += weighed(u, largest - y[j]);
      }
    }
  }

  __device__ void join(const Found& other) {
    Found same = other;
    if (!is_bounded()) {
      const S top = larger(largest, other.largest);
      same.raise(top);
      raise(top);
    }
    sum += same.sum;
    mass += same.mass;
    distance += same.distance;
    label_y += same.label_y;
    next_row += same.next_row;
  }
  template <int kLanes>
  __device__ Found over_lanes() const {
    Found all = *this;
    if (!is_bounded()) {
      all.raise(largest_of_lanes(largest, kLanes));
    }
    all.sum = sum_of_lanes(all.sum, kLanes);
    if constexpr (kCommon) {
      all.mass = sum_of_lanes(all.mass, kLanes);
      all.distance = sum_of_lanes(all.distance, kLanes);
    }
    if constexpr (kInPlace) {
      all.label_y = sum_of_lanes(label_y, kLanes);
      all.next_row = sum_of_lanes(next_row, kLanes);
    }
    return all;
  }
};

/// The results of a row, from its reductions. label_y is y of its label.
template <class T>
struct Outcome {
  using S = Accumulate<T>;

  S mass;  // U
  S logsumexp;
  S loss;

  template <class Label, class Found>
  __device__ Outcome(const Problem<T>& p, const Label& label, const Found& found, S label_y)
      : mass(found.mass + label.u) {
    const S log_sum = math::log(found.sum);
    logsumexp = p.span * found.largest + log_sum;
    loss = p.span * (found.distance + weighed(label.u, found.largest - label_y)) + mass * log_sum;
  }
};

/// V logits as y.
template <bool kCap, class T, int V>
__device__ void unpack_capped(const Problem<T>& p, const rows::Pack<T, V>& pack, Accumulate<T> (&y)[V]) {
  rows::unpack(pack, y);
  if (kCap || p.flips) {
#pragma unroll
    for (Accumulate<T>& value : y) {
      value = capped<kCap>(p, value);
    }
  }
}

/// Adds V logits, from class i of a row on.
template <class T, Target kTarget, bool kCap, bool kInPlace, int V>
__device__ void add_pack(const Problem<T>& p, std::int64_t row, std::int64_t i, const rows::Pack<T, V>& pack,
                         Found<T, kTarget, kCap, kInPlace>& found) {
  Accumulate<T> y[V];
  unpack_capped<kCap>(p, pack, y);
  found.add(y, [&](int j) { return common_u(p, row, i + j); });
}

/// The gradients of a row's logits: dx = sum_scale · 2^(log₂e · (span · y − logsumexp)) − scale · u − hit, where `hit`
/// is subtracted only for the label's class. With a cap, dx is multiplied by 1 − y².
template <class T, Target kTarget, bool kCap>
struct Gradient {
  using S = Accumulate<T>;

  const Problem<T>& p;
  std::int64_t row;
  S shift;  // with a cap, multiplied by log₂e
  S scale;  // the factor of common_u()
  S sum_scale;
  S hit;

  /// g is what the row's gradient is multiplied by.
  __device__ Gradient(const Problem<T>& p, std::int64_t row, S logsumexp, S mass, S label_u, S g)
      : p(p),
        row(row),
        shift(kCap ? logsumexp * kLog2E<S> : logsumexp),
        scale(g * p.scale),
        sum_scale(g * mass * p.scale),
        hit(g * label_u * p.scale) {}

  /// The gradient of V logits, from class i of the row on. label_at is the position of the label in the pack; it is out
  /// of range if the pack does not contain the label.
  template <int V>
  __device__ rows::Pack<T, V> operator()(const rows::Pack<T, V>& pack, std::int64_t i, int label_at) const {
    S values[V];
    unpack_capped<kCap>(p, pack, values);
    const auto all = [&](auto is_label) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const S y = values[j];
        S dz = power_of<T, kCap>(kCap ? fma(p.unit(), y, -shift) : fma(p.span, y, -shift) * kLog2E<S>, j) * sum_scale;
        if constexpr (kTarget == Target::distribution) {
          dz -= common_u(p, row, i + j) * scale;
        }
        dz -= is_label(j) ? hit : S{0};
        values[j] = kCap ? dz * fma(-y, y, S{1}) : dz;
      }
    };
    // Only one pack of a row contains the label, so the others need no test for each element. For a distribution, that
    // is not worth twice the code.
    if (kTarget == Target::distribution || static_cast<unsigned>(label_at) < V) {
      all([&](int j) { return j == label_at; });
    } else {
      all([](int) { return false; });
    }
    return rows::pack_of<T>(values);
  }
};

/// The factor of the rows' gradients, dloss / denominator, as pointers; null for 1.
template <class T>
struct Incoming {
  using S = Accumulate<T>;

  const S* dloss;
  bool per_row;
  const S* denominator;

  Incoming(const Tensor& dloss, const Tensor& denominator)
      : dloss(dloss.data_or_null<S>()),
        per_row(dloss.defined() && dloss.numel() > 1),
        denominator(denominator.data_or_null<S>()) {}

  __device__ S operator()(std::int64_t row) const {
    const S given = dloss != nullptr ? dloss[per_row ? row : 0] : S{1};
    return denominator != nullptr ? given / *denominator : given;
  }
};

/// Calls f.operator()<T, kTarget, kCap>().
template <class F>
void for_kinds(const CrossEntropyTerms& terms, const F& f) {
  on_dtype(FloatTypes{}, terms.logits.dtype(), "cross_entropy", [&]<class T>() {
    const auto with_cap = [&]<Target kTarget>() {
      terms.softcap != 0 ? f.template operator()<T, kTarget, true>() : f.template operator()<T, kTarget, false>();
    };
    target_of(terms) == Target::label ? with_cap.template operator()<Target::label>()
                                      : with_cap.template operator()<Target::distribution>();
  });
}

}  // namespace mica::kernels::xent

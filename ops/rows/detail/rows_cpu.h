#pragma once

// Vectorized loops and sums over a row. Included by *_cpu.cpp only. Functions that use them are marked
// [[gnu::flatten]], so that everything in a loop is inlined.

#include <Eigen/Core>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include <mica/core/detail/half_cpu.h>
#include <mica/core/detail/pack_cpu.h>
#include <mica/core/dispatch.h>
#include <mica/core/parallel.h>
#include <mica/core/tensor.h>

namespace mica::kernels {

// V is a pack or a single number.
template <class V, class S>
V load(const S* from) {
  V value;
  std::memcpy(&value, from, sizeof(V));
  return value;
}
template <class V, class S>
void store(S* to, V value) {
  std::memcpy(to, &value, sizeof(V));
}

// a · b + c, rounded once if the CPU has FMA. It is explicit, since the files that include this are compiled without
// automatic contraction.
template <class V, class S>
V multiply_add(V a, S b, S c) {
  if constexpr (std::is_same_v<V, S>) {
#if defined(EIGEN_VECTORIZE_FMA)
    return std::fma(a, b, c);
#else
    return a * b + c;
#endif
  } else {
    return mica::multiply_add(a, filled_pack(b), filled_pack(c));
  }
}

// Prefetches the next row while the current one is computed, so that loads and computation overlap.
class Prefetch {
 public:
  template <class T>
  explicit Prefetch(const T* row) : row_(reinterpret_cast<const char*>(row)), size_(sizeof(T)) {}

  // Prefetches the cache line of element i.
  void fetch(std::int64_t i) const { __builtin_prefetch(row_ + i * size_); }

 private:
  const char* row_;
  std::int64_t size_;
};

constexpr int kUnrolled = 4;

// Calls body.operator()<V, k>(i) for all i in [begin, end): first with packs, then one by one. k is the index of an
// accumulator; several accumulators let the CPU overlap additions.
template <class S, class Body>
void for_packs(std::int64_t begin, std::int64_t end, const Body& body) {
  using V = Pack<S>;
  std::int64_t i = begin;
  for (; i + kUnrolled * kPackWidth<S> <= end; i += kUnrolled * kPackWidth<S>) {
    [&]<int... k>(std::integer_sequence<int, k...>) { (body.template operator()<V, k>(i + k * kPackWidth<S>), ...); }
    (std::make_integer_sequence<int, kUnrolled>{});
  }
  for (; i + kPackWidth<S> <= end; i += kPackWidth<S>) {
    body.template operator()<V, 0>(i);
  }
  for (; i < end; ++i) {
    body.template operator()<S, 0>(i);
  }
}

template <class S>
class Sum {
 public:
  template <int k, class V>
  void add(V value) {
    if constexpr (std::is_same_v<V, S>) {
      rest_ += value;
    } else {
      packs_[k] += value;
    }
  }
  double total() const {
    const Pack<S> pack = (packs_[0] + packs_[1]) + (packs_[2] + packs_[3]);
    return Eigen::Map<const Eigen::Array<S, kPackWidth<S>, 1>>(reinterpret_cast<const S*>(&pack)).sum() + rest_;
  }

 private:
  Pack<S> packs_[kUnrolled] = {};
  S rest_ = 0;
};

constexpr std::int64_t kSummedAtOnce = 4096;  // the most elements that are summed in S

// Calls part(begin, end) for parts of [0, n) that are short enough to be summed in S. Their sums are added in double.
template <class Part>
void for_parts(std::int64_t n, const Part& part) {
  for (std::int64_t begin = 0; begin < n; begin += kSummedAtOnce) {
    part(begin, std::min(begin + kSummedAtOnce, n));
  }
}

// Σ term.operator()<V>(i) over [0, n).
template <class S, class Term>
double sum_of(std::int64_t n, const Term& term) {
  double total = 0;
  for_parts(n, [&](std::int64_t begin, std::int64_t end) {
    Sum<S> sum;
    for_packs<S>(begin, end,
                 [&]<class V, int k>(std::int64_t i) { sum.template add<k, V>(term.template operator()<V>(i)); });
    total += sum.total();
  });
  return total;
}

constexpr std::int64_t kRowGrain = 16384;  // with fewer elements per thread, threads cost more than they save

template <class S>
using Buffer = Eigen::Array<S, Eigen::Dynamic, 1>;

// n elements as S: `data` itself if T is S, else converted into `buffer`.
template <class S, class T>
const S* as_sums(const T* data, std::int64_t n, Buffer<S>& buffer) {
  if constexpr (std::is_same_v<S, T>) {
    return data;
  } else {
    buffer.resize(n);
    widen(data, n, buffer.data());
    return buffer.data();
  }
}

// Calls write(to), which writes n numbers of S: directly to `data` if T is S, else to `buffer`, from where they are
// converted.
template <class S, class T, class Write>
void write_as(T* data, std::int64_t n, Buffer<S>& buffer, const Write& write) {
  if constexpr (std::is_same_v<S, T>) {
    write(data);
  } else {
    buffer.resize(n);
    write(buffer.data());
    narrow(buffer.data(), n, data);
  }
}

// A parameter of dtype T or S as n numbers of S; all `absent` if it is undefined.
template <class T, class S = Accumulate<T>>
Buffer<S> parameter(const Tensor& x, std::int64_t n, double absent, const char* op) {
  Buffer<S> result = Buffer<S>::Constant(n, static_cast<S>(absent));
  if (x.defined()) {
    on_dtype(Types<S, T>{}, x.dtype(), op, [&]<class W>() {
      Buffer<S> buffer;
      std::copy_n(as_sums<S>(x.data<W>(), n, buffer), n, result.data());
    });
  }
  return result;
}

/// The number of blocks of rows of a sum over rows, each of which one thread sums. It depends on the shape alone, so
/// that the sum does not depend on the number of threads.
inline std::int64_t row_blocks(std::int64_t rows, std::int64_t columns) {
  constexpr std::int64_t kMost = 64;        // bounds both threads and scratch
  constexpr std::int64_t kRows = 8;         // per block, at least
  constexpr std::int64_t kElements = 8192;  // per block, at least
  const std::int64_t fit = std::min(rows / kRows, rows * columns / kElements);
  return rows == 0 ? 0 : std::clamp<std::int64_t>(fit, 1, kMost);
}

// out[c] = Σ partials[b][c], over the blocks in order.
template <class T, class S>
void sum_partials(const Tensor& out, const S* partials, std::int64_t blocks, const char* op) {
  if (!out.defined()) {
    return;
  }
  const std::int64_t n = out.numel();
  on_dtype(Types<S, T>{}, out.dtype(), op, [&]<class W>() {
    parallel_for(n, kRowGrain / (blocks + 1), [&](std::int64_t begin, std::int64_t end) {
      Buffer<S> buffer;
      write_as<S>(out.data<W>() + begin, end - begin, buffer, [&](S* sums) {
        std::fill_n(sums, end - begin, S(0));
        for (std::int64_t block = 0; block < blocks; ++block) {
          const S* const partial = partials + block * n + begin;
          for_packs<S>(0, end - begin, [&]<class V, int>(std::int64_t i) {
            store<V>(sums + i, load<V>(sums + i) + load<V>(partial + i));
          });
        }
      });
    });
  });
}

}  // namespace mica::kernels

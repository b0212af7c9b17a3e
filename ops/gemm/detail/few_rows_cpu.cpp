#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <type_traits>
#include <utility>
#include <vector>

#include <mica/core/detail/callable.h>
#include <mica/core/detail/pack_cpu.h>
#include <mica/core/parallel.h>
#include <mica/ops/gemm/detail/few_rows.h>

// There is one algorithm for each memory layout of b (K, N). R is the number of rows of a.
//
// Contiguous columns (the weight of a linear layer): each element of the result is the dot product of two contiguous
// vectors. A thread reads one column of b after the other.
//
//     b    column n       ────────────►  from memory, in one stream per thread; converted in registers
//     a    rows 0 … R−1   ────────────►  from the caches
//                                        sums in registers, 128 bytes for each row of a
//
// Contiguous rows: the result is a weighted sum of b's rows. A thread has a strip of columns, whose sums are in the L1
// cache, and adds kLines rows of b at a time.
//
//     b    rows k … k + kLines − 1  ════════►  from memory, pack after pack of columns: kLines · R products per pack
//     sum  rows 0 … R−1             ════════►  sum += a · (the kLines rows of b), in the L1 cache

namespace mica::gemm {

namespace {

constexpr std::int64_t kLines = 8;        // rows of b that are added at a time
constexpr std::int64_t kGrain = 1 << 16;  // with fewer elements of b per thread, threads cost more than they save
constexpr std::int64_t kStrip = 1 << 10;  // the most columns of a strip
constexpr std::int64_t kPart = 1 << 11;   // the most products that are added in S; sums of parts are added in double
constexpr std::int64_t kAhead = 3072;     // bytes from a read to its prefetch, farther than the hardware prefetcher

constexpr int kSums = static_cast<int>(128 / kPackBytes);  // packs that are added up separately
// Rows of a whose sums fit in registers, beside packs of b.
constexpr int kRowsAtOnce = std::clamp(kPackRegisters * 3 / 4 / kSums, 1, static_cast<int>(kFewRows));

/// Prefetches the memory kAhead bytes after `count` elements. The address may be past the end of b.
template <std::int64_t count, class T>
void prefetch(const T* at) {
  constexpr std::int64_t kLine = 64;
#pragma GCC unroll 4
  for (std::int64_t byte = 0; byte < count * static_cast<std::int64_t>(sizeof(T)); byte += kLine) {
    __builtin_prefetch(reinterpret_cast<const char*>(reinterpret_cast<std::uintptr_t>(at) + kAhead + byte));
  }
}

/// a with elements of type S and contiguous rows: a itself if possible, else a copy in this thread's buffer.
template <class S, class A>
const S* widened(std::int64_t m, std::int64_t depth, Matrix<A> a) {
  if constexpr (std::is_same_v<S, A>) {
    if (a.column == 1 && (a.row == depth || m == 1)) {
      return a.data;
    }
  }
  static thread_local std::vector<S> rows;
  rows.resize(static_cast<std::size_t>(m * depth));
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t k = 0; k < depth; ++k) {
      rows[static_cast<std::size_t>(i * depth + k)] = static_cast<S>(a.data[i * a.row + k * a.column]);
    }
  }
  return rows.data();
}

/// Calls body(begin, end) for parts of [0, n), each of at least `grain` elements except the last. Threads take the next
/// part when they are free, since on a busy machine they may not be equally fast.
void for_parts(std::int64_t n, std::int64_t grain, FunctionRef<void(std::int64_t, std::int64_t)> body) {
  constexpr std::int64_t kPartsPerThread = 8;
  const std::int64_t size = std::max(grain, n / (kPartsPerThread * num_threads()));
  const std::int64_t parts = (n + size - 1) / size;
  std::atomic<std::int64_t> next{0};
  parallel_for(std::min<std::int64_t>(parts, num_threads()), 1, [&](std::int64_t, std::int64_t) {
    for (std::int64_t part = next++; part < parts; part = next++) {
      body(part * size, std::min((part + 1) * size, n));
    }
  });
}

template <class T>
struct Problem {
  using S = Accumulate<T>;
  std::int64_t depth;
  const S* a;  // contiguous rows
  Matrix<T> b;
};

/// sums[r] = the dot product of row r of a and a column of b. Rows of a are a_row apart. Adds up every 32nd product
/// separately (every 16th in double), then these sums pairwise, so that the order does not depend on the size of a
/// pack.
template <class T, int R>
void dot_products(std::int64_t depth, const Accumulate<T>* a, std::int64_t a_row, const T* column,
                  Accumulate<T>* sums) {
  using S = Accumulate<T>;
  constexpr std::int64_t kWidth = kPackWidth<S>;
  Pack<S> packs[R][kSums] = {};
  std::int64_t k = 0;
  for (; k + kSums * kWidth <= depth; k += kSums * kWidth) {
    prefetch<kSums * kWidth>(column + k);
#pragma GCC unroll 8
    for (int i = 0; i < kSums; ++i) {
      const Pack<S> b = load_pack(column + k + i * kWidth);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        packs[r][i] = multiply_add(b, load_pack(a + r * a_row + k + i * kWidth), packs[r][i]);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kSums; ++i, k += kWidth) {
    const std::int64_t count = std::clamp<std::int64_t>(depth - k, 0, kWidth);
    if (count > 0) {
      const Pack<S> b = load_part(column + k, count);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        packs[r][i] = multiply_add(b, load_part(a + r * a_row + k, count), packs[r][i]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int half = kSums / 2; half > 0; half /= 2) {
#pragma GCC unroll 4
      for (int i = 0; i < half; ++i) {
        packs[r][i] += packs[r][i + half];
      }
    }
    sums[r] = sum_of(packs[r][0]);
  }
}

/// The same for any R, for at most kRowsAtOnce rows at a time: the column then comes from the L1 cache.
template <class T, int R>
void all_dot_products(std::int64_t depth, const Accumulate<T>* a, std::int64_t a_row, const T* column,
                      Accumulate<T>* sums) {
  constexpr int kNow = std::min(R, kRowsAtOnce);
  dot_products<T, kNow>(depth, a, a_row, column, sums);
  if constexpr (R > kNow) {
    all_dot_products<T, R - kNow>(depth, a + kNow * a_row, a_row, column, sums + kNow);
  }
}

/// Computes R rows of the result's columns [begin, end), for contiguous columns of b.
template <class T, class Out, int R>
void write_columns(const Problem<T>& p, std::int64_t begin, std::int64_t end, std::int64_t n, const T* bias, Out* out) {
  using S = Accumulate<T>;
  for (std::int64_t column = begin; column < end; ++column) {
    double totals[R] = {};
    for (std::int64_t k = 0; k < p.depth; k += kPart) {
      S sums[R];
      all_dot_products<T, R>(std::min(kPart, p.depth - k), p.a + k, p.depth, p.b.data + column * p.b.column + k, sums);
      std::transform(totals, totals + R, sums, totals, std::plus<double>());
    }
    const S start = bias == nullptr ? S{0} : static_cast<S>(bias[column]);
    for (int r = 0; r < R; ++r) {
      out[r * n + column] = static_cast<Out>(static_cast<S>(totals[r]) + start);
    }
  }
}

/// sums (R, strip) += a's columns k to k + lines − 1, times these rows of b, from column `column` on.
template <class T, int R>
void add_lines(const Problem<T>& p, std::int64_t k, std::int64_t lines, std::int64_t column, std::int64_t columns,
               Accumulate<T>* sums) {
  using S = Accumulate<T>;
  constexpr std::int64_t kWidth = kPackWidth<S>;
  const S* const a = p.a + k;
  const T* const b = p.b.data + k * p.b.row + column;
  for (std::int64_t c = 0; c < columns; c += kWidth) {
    const std::int64_t left = columns - c;
    Pack<S> added[R] = {};
    for (std::int64_t line = 0; line < lines; ++line) {
      const T* const from = b + line * p.b.row + c;
      const Pack<S> values = left >= kWidth ? load_pack(from) : load_part(from, left);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        added[r] = multiply_add(filled_pack(a[r * p.depth + line]), values, added[r]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      S* const sum = sums + r * kStrip + c;
      store_pack(sum, load_pack(sum) + added[r]);
    }
  }
}

/// Computes R rows of a strip of at most kStrip columns, for contiguous rows of b.
template <class T, class Out, int R>
void write_strip(const Problem<T>& p, std::int64_t column, std::int64_t columns, std::int64_t n, const T* bias,
                 Out* out) {
  using S = Accumulate<T>;
  constexpr std::int64_t kWidth = kPackWidth<S>;
  alignas(64) static thread_local std::array<S, kFewRows * kStrip> sums;
  static thread_local std::vector<double> totals;  // of the parts before the last
  totals.assign(p.depth > kPart ? R * kStrip : 0, 0);
  for (std::int64_t first = 0; first < p.depth; first += kPart) {
    for (int r = 0; r < R; ++r) {
      S* const from = sums.data() + r * kStrip;
      std::fill(from, from + (columns + kWidth - 1) / kWidth * kWidth, S{0});
    }
    const std::int64_t end = std::min(first + kPart, p.depth);
    for (std::int64_t k = first; k < end; k += kLines) {
      add_lines<T, R>(p, k, std::min(kLines, end - k), column, columns, sums.data());
    }
    for (int r = 0; end < p.depth && r < R; ++r) {
      for (std::int64_t c = 0; c < columns; ++c) {
        totals[r * kStrip + c] += sums[r * kStrip + c];
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (std::int64_t c = 0; c < columns; ++c) {
      const S start = bias == nullptr ? S{0} : static_cast<S>(bias[column + c]);
      const std::int64_t at = r * kStrip + c;
      const S sum = totals.empty() ? sums[at] : static_cast<S>(totals[at] + sums[at]);
      out[r * n + column + c] = static_cast<Out>(sum + start);
    }
  }
}

/// Calls f.operator()<rows>(), with the number of rows as a constant.
template <class F>
void on_rows(std::int64_t rows, const F& f) {
  [&]<int... R>(std::integer_sequence<int, R...>) { ((rows == R + 1 ? f.template operator()<R + 1>() : void()), ...); }
  (std::make_integer_sequence<int, kFewRows>());
}

/// Computes the result (m, n).
template <class T, class Out>
void multiply(const Problem<T>& p, std::int64_t m, std::int64_t n, const T* bias, Out* out) {
  const std::int64_t grain = kGrain / p.depth + 1;
  on_rows(m, [&]<int R>() {
    if (p.b.row == 1) {
      for_parts(n, grain,
                [&](std::int64_t begin, std::int64_t end) { write_columns<T, Out, R>(p, begin, end, n, bias, out); });
      return;
    }
    constexpr std::int64_t kWidth = 64;  // a thread's columns are a multiple of this
    for_parts((n + kWidth - 1) / kWidth, grain / kWidth + 1, [&](std::int64_t begin, std::int64_t end) {
      const std::int64_t last = std::min(end * kWidth, n);
      for (std::int64_t column = begin * kWidth; column < last; column += kStrip) {
        write_strip<T, Out, R>(p, column, std::min(kStrip, last - column), n, bias, out);
      }
    });
  });
}

}  // namespace

template <class A, class T, class Out>
void multiply_few_rows(std::int64_t m, std::int64_t n, std::int64_t depth, Matrix<A> a, Matrix<T> b, const T* bias,
                       Out* out) {
  multiply({depth, widened<Accumulate<T>>(m, depth, a), b}, m, n, bias, out);
}

#define MICA_FEW_ROWS(A, T, Out) \
  template void multiply_few_rows(std::int64_t, std::int64_t, std::int64_t, Matrix<A>, Matrix<T>, const T*, Out*);
MICA_FEW_ROWS(float, float, float)
MICA_FEW_ROWS(double, double, double)
MICA_FEW_ROWS(Float16, Float16, Float16)
MICA_FEW_ROWS(Float16, Float16, float)
MICA_FEW_ROWS(float, Float16, float)
MICA_FEW_ROWS(BFloat16, BFloat16, BFloat16)
MICA_FEW_ROWS(BFloat16, BFloat16, float)
MICA_FEW_ROWS(float, BFloat16, float)
#undef MICA_FEW_ROWS

}  // namespace mica::gemm

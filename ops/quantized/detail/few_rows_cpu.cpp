#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include <mica/core/detail/pack_cpu.h>
#include <mica/core/parallel.h>
#include <mica/ops/quantized/detail/few_rows.h>
#include <mica/ops/quantized/detail/quantized_functions.h>

// A word holds 32 / bits integers of one column, and the words of adjacent columns are adjacent. A thread processes a
// strip of columns in chunks along K, of up to 64 rows of the weight in one group:
//
//     a chunk's words   ════════►  64 bytes at a time: integers are converted to floats in registers and multiplied by
//                                  x, acc = Σ (q − zero) · x
//     scale, offset     ════════►  sums += scale · acc + offset · Σ x
//
// If x may be rounded to 8 bits, chunks have up to 32 rows. acc is then a sum of products of integers, which is exact.

namespace mica::kernels {

namespace {

constexpr std::int64_t kPacks = 64 / kPackBytes;             // packs in 64 bytes of words
constexpr std::int64_t kWidth = kPacks * kPackWidth<float>;  // and their columns
constexpr std::int64_t kMostChunk = 64;                      // the most rows of the weight in a chunk
constexpr std::int64_t kLeastStrip = 128;                    // columns
constexpr std::int64_t kMostStrip = 512;

using Words = Pack<std::uint32_t>;

Words load_words(const std::uint32_t* from) {
  Words x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

/// The integers that begin at bit `shift` of each word.
template <int kBits>
Pack<float> integers(const Words& words, int shift) {
#if defined(__AVX512F__)
  if constexpr (kBits == 4) {
    const __m512 values = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i bits;
    std::memcpy(&bits, &words, sizeof(bits));
    const __m512 chosen = _mm512_permutexvar_ps(_mm512_srli_epi32(bits, static_cast<unsigned>(shift)), values);
    Pack<float> x;
    std::memcpy(&x, &chosen, sizeof(x));
    return x;
  }
#endif
  const Words bits = (words >> shift) & ((1u << kBits) - 1);
  Pack<std::int32_t> value;
  std::memcpy(&value, &bits, sizeof(value));
  return __builtin_convertvector(value, Pack<float>);
}

/// x (M, K) converted to float, with rows padded with zeros to whole words, and the sums of its elements over each
/// chunk.
struct Rows {
  std::vector<float> x;     // (M, stride)
  std::vector<float> sums;  // (M, chunks)
  std::int64_t stride;
  std::int64_t chunks;

  Rows(const Tensor& from, std::int64_t chunk) {
    const std::int64_t m = from.size(0), depth = from.size(1);
    chunks = (depth + chunk - 1) / chunk;
    stride = chunks * chunk;
    x.assign(static_cast<std::size_t>(m * stride), 0);
    sums.resize(static_cast<std::size_t>(m * chunks));
    on_dtype(FloatTypes{}, from.dtype(), "quantized_matmul", [&]<class T>() {
      for (std::int64_t row = 0; row < m; ++row) {
        const T* const line = from.data<T>() + row * depth;
        std::transform(line, line + depth, x.begin() + row * stride, [](T value) { return static_cast<float>(value); });
      }
    });
    for (std::int64_t i = 0; i < m * chunks; ++i) {
      const float* const part = x.data() + i * chunk;
      std::array<float, 8> partial{};
      for (std::int64_t k = 0; k < chunk; k += 8) {
        for (std::size_t j = 0; j < 8; ++j) {
          partial[j] += part[k + static_cast<std::int64_t>(j)];
        }
      }
      sums[static_cast<std::size_t>(i)] = ((partial[0] + partial[4]) + (partial[2] + partial[6])) +
                                          ((partial[1] + partial[5]) + (partial[3] + partial[7]));
    }
  }
};

using Integers = Pack<std::int32_t>;

#if defined(__AVX2__) && (!defined(__AVX512F__) || defined(__AVX512BW__))

constexpr bool kHasIntegerProducts = true;

#if defined(__AVX512BW__)
#define MICA_INTEGERS(name) _mm512_##name
using Register = __m512i;
#else
#define MICA_INTEGERS(name) _mm256_##name
using Register = __m256i;
#endif

/// The sum of a chunk's integers of kBits times x, for each column.
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
template <int kBits>
class IntegerSum {
 public:
  /// Adds the four bytes of each word times those of x, which are signed.
  void add(const Words& bytes, const Integers& x) {
#if defined(__AVX512VNNI__)
    sum_ = (Integers)_mm512_dpbusd_epi32((Register)sum_, (Register)bytes, (Register)x);
#else
    sum_ = (Integers)_mm256_dpbusd_avx_epi32((Register)sum_, (Register)bytes, (Register)x);
#endif
  }
  Integers total() const { return sum_; }

 private:
  Integers sum_ = {};
};
#else
template <int kBits>
class IntegerSum {  // of pairs of 16 bits, which have room for 32 products of a number of 4 bits: 16 · 2 · 15 · 127 / 2
 public:
  void add(const Words& bytes, const Integers& x) {
    const Register products = MICA_INTEGERS(maddubs_epi16)((Register)bytes, (Register)x);
    sum_ = (Integers)MICA_INTEGERS(add_epi16)((Register)sum_, products);
  }
  Integers total() const { return (Integers)MICA_INTEGERS(madd_epi16)((Register)sum_, MICA_INTEGERS(set1_epi16)(1)); }

 private:
  Integers sum_ = {};
};

template <>
class IntegerSum<8> {  // the sum of two products would not fit 16 bits
 public:
  void add(const Words& bytes, const Integers& x) {
    const Register odd_x = MICA_INTEGERS(srai_epi16)((Register)x, 8);
    const Register even_x = MICA_INTEGERS(srai_epi16)(MICA_INTEGERS(slli_epi16)((Register)x, 8), 8);
    const Register odd = MICA_INTEGERS(srli_epi16)((Register)bytes, 8);
    const Words even = bytes & 0x00ff00ffU;
    sum_ +=
        (Integers)MICA_INTEGERS(madd_epi16)(odd, odd_x) + (Integers)MICA_INTEGERS(madd_epi16)((Register)even, even_x);
  }
  Integers total() const { return sum_; }

 private:
  Integers sum_ = {};
};
#endif
#undef MICA_INTEGERS

#else

constexpr bool kHasIntegerProducts = false;

template <int kBits>
class IntegerSum {  // never used, and so without definitions
 public:
  void add(const Words& bytes, const Integers& x);
  Integers total() const;
};

#endif

/// x (M, K) rounded to integers of 8 bits: x ≈ scale · q with |q| ≤ 127, and one scale for each chunk of a row.
struct RoundedRows {
  std::vector<std::int32_t> x;  // (M, chunks, chunk / 4), four integers each, in the order of IntegerSum::add's bytes
  std::vector<float> scales;    // (M, chunks)
  std::vector<float> sums;      // of the integers, likewise
  std::int64_t chunks;

  /// `from` has chunks of kChunk elements.
  template <int kBits, int kChunk>
  static RoundedRows of(const Rows& from) {
    constexpr int kPerWord = quantized::kWordBits / kBits, kParts = 8 / kBits;
    RoundedRows to{.x = {}, .scales = {}, .sums = {}, .chunks = from.chunks};
    const std::size_t count = from.sums.size();
    to.x.resize(count * (kChunk / 4));
    to.scales.resize(count);
    to.sums.resize(count);
    for (std::size_t i = 0; i < count; ++i) {
      const float* const part = from.x.data() + i * kChunk;
      std::uint32_t most_bits = 0;  // of the largest magnitude; NaN has more than infinity
      for (int k = 0; k < kChunk; ++k) {
        most_bits = std::max(most_bits, std::bit_cast<std::uint32_t>(part[k]) & 0x7fffffffU);
      }
      const auto most = std::bit_cast<float>(most_bits);
      constexpr float kLeast = 1e-30F;  // smaller elements become 0: the inverse might be infinite
      const bool some = most >= kLeast && std::isfinite(most);
      const float inverse = some ? 127 / most : 0;
      std::array<std::int8_t, kChunk> q, ordered;
      std::int32_t sum = 0;
      for (std::size_t k = 0; k < kChunk; ++k) {
        const float value = some ? std::nearbyint(part[k] * inverse) : 0;
        q[k] = static_cast<std::int8_t>(value);
        sum += static_cast<std::int32_t>(value);
      }
      // Byte j of part p of a word is its integer j · kParts + p.
      for (std::size_t line = 0; line < kChunk; line += kPerWord) {
        for (std::size_t p = 0; p < kParts; ++p) {
          for (std::size_t j = 0; j < 4; ++j) {
            ordered[line + p * 4 + j] = q[line + j * kParts + p];
          }
        }
      }
      std::memcpy(to.x.data() + i * (kChunk / 4), ordered.data(), kChunk);
      to.scales[i] = some ? most / 127 : std::isfinite(most) ? 0 : std::numeric_limits<float>::quiet_NaN();
      to.sums[i] = static_cast<float>(sum);
    }
    return to;
  }
};

/// The factors of a strip's columns. Every mode is computed as (q − zero) · scale + offset.
struct Grid {
  alignas(64) std::array<float, kMostStrip> zero;
  alignas(64) std::array<float, kMostStrip> scale;
  alignas(64) std::array<float, kMostStrip> offset;
};

void widen_strip(const Tensor& x, std::int64_t at, std::int64_t count, float* to) {
  on_dtype(FloatTypes{}, x.dtype(), "quantized_matmul", [&]<class T>() {
    const T* const from = x.data<T>() + at;
    std::int64_t c = 0;
    if constexpr (!std::is_same_v<T, double>) {
      for (; c + kPackWidth<float> <= count; c += kPackWidth<float>) {
        store_pack(to + c, load_pack(from + c));
      }
    }
    for (; c < count; ++c) {
      to[c] = static_cast<float>(from[c]);
    }
  });
}

/// The same for scales or zeros of `group`, which may have two levels.
void widen_group(const Tensor& x, const Tensor& factor, std::int64_t first_row, std::int64_t at, std::int64_t column,
                 std::int64_t count, float* to) {
  if (!factor.defined()) {
    widen_strip(x, at, count, to);
    return;
  }
  widen_strip(factor, first_row / quantized::kFactorRows * factor.size(1) + column, count, to);
  const std::uint8_t* const from = x.data<std::uint8_t>() + at;
  for (std::int64_t c = 0; c < count; ++c) {
    to[c] *= static_cast<float>(static_cast<int>(from[c]) - quantized::kFactorZero);
  }
}

class Product {
 public:
  explicit Product(const QuantizedWeight& q)
      : q_(q),
        words_(reinterpret_cast<const std::uint32_t*>(q.packed.data<std::int32_t>())),
        columns_(q.columns()),
        group_size_(quantized::rows_of_group(q.rows, q.group_size)),
        chunk_(q.group_size == 16 || q.group_size == 32 ? q.group_size : kMostChunk) {}

  std::int64_t chunk() const { return chunk_; }

  /// sums (R, kMostStrip) = R rows of x times the `count` columns of the weight from `column` on.
  template <int kBits, int R>
  void multiply(const Rows& rows, std::int64_t column, std::int64_t count, float* sums) const {
    constexpr std::int64_t kPerWord = quantized::kWordBits / kBits;
    Grid grid;
    begin_grid(count, grid);
    std::int64_t group = -1;
    for (int r = 0; r < R; ++r) {
      std::fill_n(sums + r * kMostStrip, (count + kWidth - 1) / kWidth * kWidth, 0.0F);
    }
    for (std::int64_t i = 0; i < rows.chunks; ++i) {
      const std::int64_t k = i * chunk_;
      if (k / group_size_ != group) {
        group = k / group_size_;
        read_grid(group, column, count, grid);
      }
      const std::int64_t lines = (std::min(chunk_, q_.rows - k) + kPerWord - 1) / kPerWord;
      std::int64_t c = 0;
      for (; c + kWidth <= count; c += kWidth) {
        add_chunk<kBits, R>(words_ + k / kPerWord * columns_ + column + c, columns_, lines, rows, i, grid, c, sums);
      }
      if (c < count) {
        std::array<std::uint32_t, 32 * kWidth> last{};  // a copy of the last, incomplete pack of columns
        for (std::int64_t line = 0; line < lines; ++line) {
          std::copy_n(words_ + (k / kPerWord + line) * columns_ + column + c, count - c, last.data() + line * kWidth);
        }
        add_chunk<kBits, R>(last.data(), kWidth, lines, rows, i, grid, c, sums);
      }
    }
  }

  /// The same for R rounded rows from `row` on, whose chunks are kChunk long.
  template <int kBits, int R, int kChunk>
  void multiply(const RoundedRows& rows, std::int64_t row, std::int64_t column, std::int64_t count, float* sums) const {
    constexpr std::int64_t kPerWord = quantized::kWordBits / kBits, kLines = kChunk / kPerWord;
    Grid grid;
    begin_grid(count, grid);
    std::int64_t group = -1;
    for (int r = 0; r < R; ++r) {
      std::fill_n(sums + r * kMostStrip, (count + kWidth - 1) / kWidth * kWidth, 0.0F);
    }
    for (std::int64_t i = 0; i < rows.chunks; ++i) {
      const std::int64_t k = i * kChunk;
      if (k / group_size_ != group) {
        group = k / group_size_;
        read_grid(group, column, count, grid);
      }
      const std::int64_t lines = (std::min<std::int64_t>(kChunk, q_.rows - k) + kPerWord - 1) / kPerWord;
      const std::uint32_t* const words = words_ + k / kPerWord * columns_ + column;
      const std::int64_t whole = lines == kLines ? count / kWidth * kWidth : 0;
      add_rounded_chunk<kBits, R, kChunk>(words, columns_, 0, whole, rows, row, i, grid, sums);
      for (std::int64_t c = whole; c < count; c += kWidth) {  // copies of incomplete packs of columns and chunks
        std::array<std::uint32_t, kLines * kWidth> last{};
        for (std::int64_t line = 0; line < lines; ++line) {
          std::copy_n(words + line * columns_ + c, std::min(kWidth, count - c), last.data() + line * kWidth);
        }
        add_rounded_chunk<kBits, R, kChunk>(last.data(), kWidth, c, c + kWidth, rows, row, i, grid, sums);
      }
    }
  }

 private:
  /// Prefetches the same columns of the next group. Past the end of `x`, that does nothing.
  void prefetch_next_group(const Tensor& x, std::int64_t at, std::int64_t count) const {
    constexpr std::int64_t kLine = 64;
    const std::int64_t size = size_of(x.dtype());
    const std::uintptr_t next =
        reinterpret_cast<std::uintptr_t>(x.raw_data()) + static_cast<std::uintptr_t>((at + columns_) * size);
    for (std::int64_t byte = 0; byte < count * size; byte += kLine) {
      __builtin_prefetch(reinterpret_cast<const char*>(next + static_cast<std::uintptr_t>(byte)));
    }
  }

  bool adds() const { return q_.mode == QuantizationMode::fused_multiply_add; }

  /// Fills in the factors that are the same for all groups, and zeros past the last column.
  void begin_grid(std::int64_t count, Grid& grid) const {
    const std::int64_t width = (count + kWidth - 1) / kWidth * kWidth;
    for (auto* const factors : {&grid.zero, &grid.scale, &grid.offset}) {
      std::fill_n(factors->begin(), width, 0.0F);
    }
    if (!q_.scale.defined()) {
      std::fill_n(grid.scale.begin(), count, 1.0F);
    }
    if (q_.zero.defined() && q_.zero.dim() == 0) {
      float zero = 0;
      widen_strip(q_.zero, 0, 1, &zero);
      std::fill_n(adds() ? grid.offset.begin() : grid.zero.begin(), count, zero);
    }
  }

  void read_grid(std::int64_t group, std::int64_t column, std::int64_t count, Grid& grid) const {
    const std::int64_t at = group * columns_ + column;
    for (const Tensor* const part : {&q_.scale, &q_.zero}) {
      if (part->defined() && part->dim() == 2) {
        prefetch_next_group(*part, at, count);
      }
    }
    if (q_.scale.defined()) {
      widen_group(q_.scale, q_.scale_factor, group * group_size_, at, column, count, grid.scale.data());
    }
    if (q_.zero.defined() && q_.zero.dim() != 0) {
      float* const zero = adds() ? grid.offset.data() : grid.zero.data();
      widen_group(q_.zero, q_.zero_factor, group * group_size_, at, column, count, zero);
    }
  }

  /// Adds chunk i of kWidth columns to the sums, from column c of the strip on. A row of words has `stride` columns.
  /// Not inlined, which would only double the compile time.
  template <int kBits, int R>
  [[gnu::noinline]] void add_chunk(const std::uint32_t* words, std::int64_t stride, std::int64_t lines,
                                   const Rows& rows, std::int64_t i, const Grid& grid, std::int64_t c,
                                   float* sums) const {
    constexpr int kPerWord = quantized::kWordBits / kBits;
    constexpr int kSums = 2;                      // independent accumulators, so that consecutive additions overlap
    constexpr int kAtOnce = R <= 2 ? kPacks : 1;  // packs computed at once: their sums must fit in registers
    Pack<float> acc[R][kSums][kPacks] = {};
    Pack<float> zero[kPacks];
    for (int p = 0; p < kPacks; ++p) {
      zero[p] = load_pack(grid.zero.data() + c + p * kPackWidth<float>);
    }
    const float* x = rows.x.data() + i * chunk_;
    for (std::int64_t line = 0; line < lines; ++line, x += kPerWord) {
      // Prefetches the same columns of the next chunk. Past the end of the weight, that does nothing.
      __builtin_prefetch(reinterpret_cast<const char*>(reinterpret_cast<std::uintptr_t>(words) +
                                                       static_cast<std::uintptr_t>(4 * (line + lines) * stride)));
#pragma GCC unroll 4
      for (int first = 0; first < kPacks; first += kAtOnce) {
        Words some[kAtOnce];
        for (int p = 0; p < kAtOnce; ++p) {
          some[p] = load_words(words + line * stride + (first + p) * kPackWidth<float>);
        }
#pragma GCC unroll 32
        for (int j = 0; j < kPerWord; ++j) {
#pragma GCC unroll 4
          for (int p = 0; p < kAtOnce; ++p) {
            const Pack<float> value = integers<kBits>(some[p], j * kBits) - zero[first + p];
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
              Pack<float>& sum = acc[r][j % kSums][first + p];
              sum = multiply_add(value, filled_pack(x[r * rows.stride + j]), sum);
            }
          }
        }
      }
    }
    for (int p = 0; p < kPacks; ++p, c += kPackWidth<float>) {
      const Pack<float> scale = load_pack(grid.scale.data() + c), offset = load_pack(grid.offset.data() + c);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Pack<float> sum = acc[r][0][p] + acc[r][1][p];
        float* const to = sums + r * kMostStrip + c;
        const Pack<float> total = filled_pack(rows.sums[static_cast<std::size_t>(r * rows.chunks + i)]);
        store_pack(to, multiply_add(offset, total, multiply_add(scale, sum, load_pack(to))));
      }
    }
  }

  /// Adds chunk i of R rows from `row` on to the sums of the strip's columns from `from` to `to`. `words` is the first
  /// of these columns.
  template <int kBits, int R, int kChunk>
  [[gnu::noinline]] void add_rounded_chunk(const std::uint32_t* words, std::int64_t stride, std::int64_t from,
                                           std::int64_t to, const RoundedRows& rows, std::int64_t row, std::int64_t i,
                                           const Grid& grid, float* sums) const {
    if constexpr (kHasIntegerProducts) {
      constexpr int kParts = 8 / kBits, kLines = kChunk * kBits / quantized::kWordBits;
      constexpr std::uint32_t kMask = 0x01010101U * ((1U << kBits) - 1);
      const bool adds = this->adds();
      Integers x[R][kChunk / 4];
      Pack<float> scales[R], totals[R];
      for (int r = 0; r < R; ++r) {
        const auto at = static_cast<std::size_t>((row + r) * rows.chunks + i);
        for (std::size_t j = 0; j < kChunk / 4; ++j) {
          x[r][j] = filled_pack(rows.x[at * (kChunk / 4) + j]);
        }
        scales[r] = filled_pack(rows.scales[at]);
        totals[r] = filled_pack(rows.sums[at]);
      }
      for (std::int64_t c = from; c < to; c += kPackWidth<float>, words += kPackWidth<float>) {
        IntegerSum<kBits> acc[R];
#pragma GCC unroll 8
        for (int line = 0; line < kLines; ++line) {
          __builtin_prefetch(reinterpret_cast<const char*>(reinterpret_cast<std::uintptr_t>(words) +
                                                           static_cast<std::uintptr_t>(4 * (line + kLines) * stride)));
          const Words some = load_words(words + line * stride);
#pragma GCC unroll 8
          for (int p = 0; p < kParts; ++p) {
            const Words bytes = kBits == 8 ? some : (some >> (p * kBits)) & kMask;
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
              acc[r].add(bytes, x[r][line * kParts + p]);
            }
          }
        }
        const Pack<float> zero = load_pack(grid.zero.data() + c), scale = load_pack(grid.scale.data() + c);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          float* const sum = sums + r * kMostStrip + c;
          const Pack<float> product = __builtin_convertvector(acc[r].total(), Pack<float>) - zero * totals[r];
          store_pack(sum, multiply_add(scale * scales[r], product, load_pack(sum)));
        }
        for (int r = 0; adds && r < R; ++r) {
          float* const sum = sums + r * kMostStrip + c;
          store_pack(sum, multiply_add(load_pack(grid.offset.data() + c), scales[r] * totals[r], load_pack(sum)));
        }
      }
    }
  }

  const QuantizedWeight& q_;
  const std::uint32_t* words_;
  std::int64_t columns_, group_size_, chunk_;
};

/// Runs multiply(product, column, count, sums) for strips of columns, with sums (M, kMostStrip), and writes them.
template <class Multiply>
void multiply_strips(const QuantizedMatmulForward& args, WriteLine<float> write, const Multiply& multiply) {
  const std::int64_t m = args.x.size(0), n = args.weight.columns();
  const std::int64_t wanted = std::clamp(n / (2 * num_threads()), kLeastStrip, kMostStrip);
  const std::int64_t strip = (wanted + kWidth - 1) / kWidth * kWidth;
  const std::int64_t strips = (n + strip - 1) / strip;
  const float* const row_factors = args.rows.data_or_null<float>();
  const float* const column_factors = args.columns.data_or_null<float>();
  void* const out = args.y.raw_data();
  // Threads take the next strip when they are free, since on a busy machine they may not be equally fast.
  std::atomic<std::int64_t> next{0};
  parallel_for(std::min<std::int64_t>(strips, num_threads()), 1, [&](std::int64_t, std::int64_t) {
    alignas(64) std::array<float, kFewQuantizedRows * kMostStrip> sums;
    for (std::int64_t i = next++; i < strips; i = next++) {
      const std::int64_t column = i * strip, count = std::min(strip, n - column);
      multiply(column, count, sums.data());
      for (std::int64_t row = 0; row < m; ++row) {
        write(sums.data() + row * kMostStrip, row_factors == nullptr ? 1.0F : row_factors[row],
              column_factors == nullptr ? nullptr : column_factors + column, count, out, row * n + column);
      }
    }
  });
}

template <int kBits>
void multiply_rows(const QuantizedMatmulForward& args, WriteLine<float> write) {
  const Product product(args.weight);
  const Rows rows(args.x, product.chunk());
  const std::int64_t m = args.x.size(0);
  multiply_strips(args, write, [&](std::int64_t column, std::int64_t count, float* sums) {
    [&]<int... R>(std::integer_sequence<int, R...>) {
      ((m == R + 1 ? product.multiply<kBits, R + 1>(rows, column, count, sums) : void()), ...);
    }
    (std::make_integer_sequence<int, kFewQuantizedRows>());
  });
}

template <int kBits, int kChunk>
void multiply_rounded_rows(const QuantizedMatmulForward& args, WriteLine<float> write) {
  constexpr int kAtOnce = 4;  // rows
  const Product product(args.weight);
  const RoundedRows rows = RoundedRows::of<kBits, kChunk>(Rows(args.x, kChunk));
  const std::int64_t m = args.x.size(0);
  multiply_strips(args, write, [&](std::int64_t column, std::int64_t count, float* sums) {
    for (std::int64_t row = 0; row < m; row += kAtOnce) {
      [&]<int... R>(std::integer_sequence<int, R...>) {
        ((std::min<std::int64_t>(kAtOnce, m - row) == R + 1
              ? product.multiply<kBits, R + 1, kChunk>(rows, row, column, count, sums + row * kMostStrip)
              : void()),
         ...);
      }
      (std::make_integer_sequence<int, kAtOnce>());
    }
  });
}

}  // namespace

bool has_integer_products() { return kHasIntegerProducts; }

void quantized_few_rows(const QuantizedMatmulForward& args, WriteLine<float> write) {
  quantized::on_bits(args.weight.bits, [&]<int kBits>() {
    if (!kHasIntegerProducts || !args.rounds_x) {
      multiply_rows<kBits>(args, write);
    } else if (kBits > 1 && args.weight.group_size == 16) {
      multiply_rounded_rows<std::max(kBits, 2), 16>(args, write);
    } else {
      multiply_rounded_rows<kBits, 32>(args, write);
    }
  });
}

}  // namespace mica::kernels

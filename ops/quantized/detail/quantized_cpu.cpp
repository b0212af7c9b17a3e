// GCC 12 warns about uninitialized variables in its own AVX-512 intrinsics, and about packets as template
// arguments.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wignored-attributes"
#endif
#define EIGEN_DONT_PARALLELIZE
#include <bit>

#include <mica/core/copy.h>
#include <mica/core/detail/half_cpu.h>
#include <mica/ops/gemm/detail/gemm_cpu.h>
#include <mica/ops/quantized/detail/few_rows.h>
#include <mica/ops/quantized/detail/quantized_functions.h>
#include <mica/ops/quantized/detail/quantized_kernels.h>

// The product of more than a few rows (few_rows_cpu.cpp has those), in tiles of columns. For each tile, slices of
// gemm::kSum rows of the weight are dequantized once for up to kRowBlock rows of x, and multiplied by the loops of
// ops/gemm. The order of each sum depends on K alone.

namespace mica::kernels {

namespace {

template <class S>
constexpr int kTile = gemm::Tile<S>::kColumns;
static_assert(32 % kTile<float> == 0 && 32 % kTile<double> == 0);  // so a tile of the weight's rows is in two groups

constexpr std::int64_t kRowBlock = 256;

template <class S>
Tensor converted(const Tensor& x) {
  if (!x.defined() || x.dtype() == dtype_of<S>) {
    return x;
  }
  const Tensor result = empty(x.shape(), dtype_of<S>);
  copy_into(result, x);
  return result;
}

// Scales or zeros, as one level.
template <class S>
Tensor one_level(const Tensor& x, const Tensor& factor, std::int64_t group_size) {
  if (!factor.defined()) {
    return converted<S>(x);
  }
  const Tensor factors = converted<S>(factor), result = empty(x.shape(), dtype_of<S>);
  const std::int64_t n = x.size(1);
  for (std::int64_t group = 0; group < x.size(0); ++group) {
    const std::uint8_t* const from = x.data<std::uint8_t>() + group * n;
    const S* const by = factors.template data<S>() + group * group_size / quantized::kFactorRows * n;
    S* const to = result.template data<S>() + group * n;
    for (std::int64_t i = 0; i < n; ++i) {
      to[i] = static_cast<S>(static_cast<int>(from[i]) - quantized::kFactorZero) * by[i];
    }
  }
  return result;
}

// How an integer q becomes a weight: (q − zero) · scale + offset in every mode, with zero = 0, scale = 1 or offset = 0
// for what the mode lacks.
template <class S>
struct Grid {
  S zero;
  S scale;
  S offset;

  S value(std::uint32_t q) const { return (static_cast<S>(static_cast<std::int32_t>(q)) - zero) * scale + offset; }
};

template <class S>
class Weights {
 public:
  explicit Weights(const QuantizedWeight& q)
      : scales_(one_level<S>(q.scale, q.scale_factor, q.group_size)),
        zeros_(one_level<S>(q.zero, q.zero_factor, q.group_size)),
        words_(reinterpret_cast<const std::uint32_t*>(q.packed.data<std::int32_t>())),
        scale_(scales_.data_or_null<S>()),
        zero_(zeros_.data_or_null<S>()),
        one_zero_(q.zero.defined() && q.zero.dim() == 0),
        adds_(q.mode == QuantizationMode::fused_multiply_add),
        group_size_(quantized::rows_of_group(q.rows, q.group_size)),
        rows_(q.rows),
        columns_(q.columns()) {
    quantized::on_bits(q.bits, [this]<int kBits>() {
      dequantize_ = &Weights::dequantize_bits<kBits>;
      dequantize_transposed_ = &Weights::dequantize_bits_transposed<kBits>;
    });
  }

  std::int64_t rows() const { return rows_; }
  std::int64_t columns() const { return columns_; }

  Grid<S> grid(std::int64_t group, std::int64_t column) const {
    const std::int64_t at = group * columns_ + column;
    const S zero = zero_ == nullptr ? S{0} : zero_[one_zero_ ? 0 : at];
    return {.zero = adds_ ? S{0} : zero, .scale = scale_ == nullptr ? S{1} : scale_[at], .offset = adds_ ? zero : S{0}};
  }

  /// out (depth, kTile) = rows [row, row + depth) of `count` columns from `column` on, padded with zeros; `row` is a
  /// multiple of 32.
  void dequantize(std::int64_t row, std::int64_t depth, std::int64_t column, std::int64_t count, S* out) const {
    (this->*dequantize_)(row, depth, column, count, out);
  }

  /// out (depth, kTile) = the transpose of columns [column, column + depth) of kTile rows from `row` on, a multiple of
  /// kTile. Elements past the last row are arbitrary.
  void dequantize_transposed(std::int64_t column, std::int64_t depth, std::int64_t row, S* out) const {
    (this->*dequantize_transposed_)(column, depth, row, out);
  }

 private:
  template <int kBits>
  void dequantize_bits(std::int64_t row, std::int64_t depth, std::int64_t column, std::int64_t count, S* out) const {
    constexpr int kPerWord = quantized::kWordBits / kBits;
    std::array<std::uint32_t, kTile<S>> words{};
    std::array<S, kTile<S>> zero{};
    std::array<S, kTile<S>> scale{};
    std::array<S, kTile<S>> offset{};
    std::int64_t group = -1;
    for (std::int64_t k = row; k < row + depth; k += kPerWord) {
      if (k / group_size_ != group) {
        group = k / group_size_;
        for (std::int64_t c = 0; c < count; ++c) {
          const Grid<S> g = grid(group, column + c);
          zero[c] = g.zero;
          scale[c] = g.scale;
          offset[c] = g.offset;
        }
      }
      std::copy_n(words_ + k / kPerWord * columns_ + column, count, words.data());
      const int valid = static_cast<int>(std::min<std::int64_t>(kPerWord, row + depth - k));
      for (int i = 0; i < valid; ++i, out += kTile<S>) {
        MICA_INDEPENDENT
        for (int c = 0; c < kTile<S>; ++c) {
          const std::uint32_t q = words[c] >> (i * kBits) & ((1u << kBits) - 1);
          out[c] = Grid<S>{zero[c], scale[c], offset[c]}.value(q);
        }
      }
    }
  }

  template <int kBits>
  void dequantize_bits_transposed(std::int64_t column, std::int64_t depth, std::int64_t row, S* out) const {
    constexpr int kPerWord = quantized::kWordBits / kBits;
    constexpr int kRun = std::min(kPerWord, kTile<S>);  // rows of the tile in one word
    const std::int64_t end = std::min<std::int64_t>(rows_ - row, kTile<S>);
    std::fill(out, out + depth * kTile<S>, S{0});
    for (std::int64_t n = column; n < column + depth; ++n, out += kTile<S>) {
      Grid<S> g = grid(row / group_size_, n);
      for (std::int64_t first = 0; first < end; first += kRun) {
        const std::int64_t k = row + first;
        if (first == 16 && group_size_ == 16) {
          g = grid(k / 16, n);
        }
        const std::uint32_t word = words_[k / kPerWord * columns_ + n] >> (k % kPerWord * kBits);
        MICA_INDEPENDENT
        for (int i = 0; i < kRun; ++i) {
          out[first + i] = g.value(word >> (i * kBits) & ((1u << kBits) - 1));
        }
      }
    }
  }

  Tensor scales_, zeros_;  // own the memory of the pointers
  const std::uint32_t* words_;
  const S* scale_;
  const S* zero_;
  bool one_zero_;
  bool adds_;
  std::int64_t group_size_, rows_, columns_;
  // The member functions for the weight's number of bits.
  void (Weights::*dequantize_)(std::int64_t row, std::int64_t depth, std::int64_t column, std::int64_t count,
                               S* out) const;
  void (Weights::*dequantize_transposed_)(std::int64_t column, std::int64_t depth, std::int64_t row, S* out) const;
};

// The WriteLine function for an output of dtype T.
template <class S, class T>
void write_line(const S* line, S row_factor, const S* factors, std::int64_t count, void* output, std::int64_t at) {
  T* const to = static_cast<T*>(output) + at;
  if (factors == nullptr) {
    std::transform(line, line + count, to, [row_factor](S value) { return static_cast<T>(value * row_factor); });
  } else {
    std::transform(line, line + count, factors, to,
                   [row_factor](S value, S factor) { return static_cast<T>(value * factor * row_factor); });
  }
}

// Computes out (M, N) = rows · (a (M, K) · b (K, N)) · columns. The factors may be null.
template <class S>
struct Product {
  std::int64_t m, n, depth;
  const S* a;
  const S* row_factors;
  const S* column_factors;
  void* out;
  WriteLine<S> write;  // for out's dtype

  /// b(k, part, column, count, to) writes a part of b, `count` columns wide, as (part, kTile).
  template <class B>
  void run(const B& b) const {
    const std::int64_t tiles = (n + kTile<S> - 1) / kTile<S>;
    const std::int64_t blocks = (m + kRowBlock - 1) / kRowBlock;
    // Dequantizing a weight takes about as long as eight multiplications.
    const std::int64_t work = (std::min(m, kRowBlock) + 8) * kTile<S> * depth;
    parallel_for(blocks * tiles, gemm::kMultiplyGrain / work + 1, [&](std::int64_t begin, std::int64_t end) {
      static thread_local gemm::Buffer<S> weights;
      static thread_local gemm::Buffer<S> sums;
      S* const some_weights = gemm::grown(weights, gemm::kSum * kTile<S>);
      S* const block_sums = gemm::grown(sums, kRowBlock * kTile<S>);
      for (; begin < end; ++begin) {
        const std::int64_t row = begin / tiles * kRowBlock;
        const std::int64_t column = begin % tiles * kTile<S>;
        const std::int64_t rows = std::min(kRowBlock, m - row);
        const std::int64_t columns = std::min<std::int64_t>(kTile<S>, n - column);
        for (std::int64_t k = 0; k < depth; k += gemm::kSum) {
          const std::int64_t part = std::min(gemm::kSum, depth - k);
          b(k, part, column, columns, some_weights);
          add_part(row, rows, k, part, some_weights, block_sums);
        }
        write_block(row, rows, column, columns, block_sums);
      }
    });
  }

 private:
  void add_part(std::int64_t row, std::int64_t rows, std::int64_t k, std::int64_t part, const S* weights,
                S* sums) const {
    static constexpr std::array<S, kTile<S>> kZeros{};
    constexpr std::int64_t kRows = gemm::Tile<S>::kRows;
    for (std::int64_t i = 0; i < rows; i += kRows) {
      const auto multiply = gemm::tile_function<S>(static_cast<int>(std::min(kRows, rows - i)), 2, k > 0);
      multiply(part, a + (row + i) * depth + k, depth, 1, weights, kZeros.data(), sums + i * kTile<S>, kTile<S>);
    }
  }

  void write_block(std::int64_t row, std::int64_t rows, std::int64_t column, std::int64_t columns,
                   const S* sums) const {
    const S* const factors = column_factors == nullptr ? nullptr : column_factors + column;
    for (std::int64_t i = 0; i < rows; ++i) {
      const S row_factor = row_factors == nullptr ? S{1} : row_factors[row + i];
      write(sums + i * kTile<S>, row_factor, factors, columns, out, (row + i) * n + column);
    }
  }
};

// x · columns, for backward, where the columns' factors are along the axis that is summed.
template <class S>
Tensor scaled(const Tensor& x, const Tensor& columns) {
  const Tensor wide = converted<S>(x);
  if (!columns.defined()) {
    return wide;
  }
  const std::int64_t n = x.size(1);
  const Tensor result = empty(x.shape(), dtype_of<S>);
  const S* const from = wide.template data<S>();
  const S* const factors = columns.data<S>();
  S* const to = result.template data<S>();
  parallel_for(x.size(0), gemm::kPackGrain / n + 1, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      for (std::int64_t i = 0; i < n; ++i) {
        to[row * n + i] = from[row * n + i] * factors[i];
      }
    }
  });
  return result;
}

// From this number of rows on, the speed of bfloat16 tiles is worth rounding weights to bfloat16.
constexpr std::int64_t kTileRows = 32;

bool has_tiles(const QuantizedMatmulForward& args) {
  return args.x.dtype() == bfloat16 && args.x.size(0) >= kTileRows && gemm::bfloat16_unit() != gemm::Bfloat16Unit::none;
}

// The product with the weight rounded to bfloat16.
void forward_by_tiles(const QuantizedMatmulForward& args, WriteLine<float> write) {
  const std::int64_t m = args.x.size(0), n = args.weight.columns(), depth = args.weight.rows;
  const Tensor weight = empty({depth, n}, bfloat16);
  dequantize(Cpu{}, {.weight = args.weight, .out = weight});
  const gemm::Matrix<BFloat16> a{args.x.data<BFloat16>(), depth, 1}, b{weight.data<BFloat16>(), n, 1};
  const std::vector<float> zeros(static_cast<std::size_t>(n));
  if (!args.rows.defined() && !args.columns.defined()) {
    gemm::multiply_bfloat16(m, n, depth, a, b, zeros.data(), args.y.data<BFloat16>());
    return;
  }
  const Tensor sums = empty({m, n}, float32);
  gemm::multiply_bfloat16(m, n, depth, a, b, zeros.data(), sums.data<float>());
  const float* const rows = args.rows.data_or_null<float>();
  parallel_for(m, gemm::kPackGrain / n + 1, [&](std::int64_t begin, std::int64_t end) {
    for (; begin < end; ++begin) {
      write(sums.data<float>() + begin * n, rows == nullptr ? 1.0F : rows[begin], args.columns.data_or_null<float>(), n,
            args.y.raw_data(), begin * n);
    }
  });
}

template <class S>
void forward(const QuantizedMatmulForward& args, WriteLine<S> write) {
  if constexpr (std::is_same_v<S, float>) {
    if (args.x.size(0) <= kFewQuantizedRows) {
      quantized_few_rows(args, write);
      return;
    }
    if (has_tiles(args)) {
      forward_by_tiles(args, write);
      return;
    }
  }
  const Weights<S> weights(args.weight);
  const Tensor x = converted<S>(args.x);
  const Product<S> product{.m = x.size(0),
                           .n = weights.columns(),
                           .depth = weights.rows(),
                           .a = x.data<S>(),
                           .row_factors = args.rows.data_or_null<S>(),
                           .column_factors = args.columns.data_or_null<S>(),
                           .out = args.y.raw_data(),
                           .write = write};
  product.run([&](std::int64_t k, std::int64_t part, std::int64_t column, std::int64_t count, S* to) {
    weights.dequantize(k, part, column, count, to);
  });
}

template <class S>
void backward(const QuantizedMatmulBackward& args, WriteLine<S> write) {
  const Weights<S> weights(args.weight);
  const Tensor dy = scaled<S>(args.dy, args.columns);
  const Product<S> product{.m = dy.size(0),
                           .n = weights.rows(),
                           .depth = weights.columns(),
                           .a = dy.data<S>(),
                           .row_factors = args.rows.data_or_null<S>(),
                           .column_factors = nullptr,
                           .out = args.dx.raw_data(),
                           .write = write};
  product.run([&](std::int64_t n, std::int64_t part, std::int64_t row, std::int64_t, S* to) {
    weights.dequantize_transposed(n, part, row, to);
  });
}

template <class S>
void dequantize_all(const Dequantize& args, WriteLine<S> write) {
  const Weights<S> weights(args.weight);
  void* const out = args.out.raw_data();
  const std::int64_t n = weights.columns();
  const std::int64_t tiles = (n + kTile<S> - 1) / kTile<S>;
  const std::int64_t runs = (weights.rows() + 31) / 32;
  parallel_for(runs * tiles, gemm::kPackGrain / (32 * kTile<S>)+1, [&](std::int64_t begin, std::int64_t end) {
    std::array<S, 32 * kTile<S>> values;
    for (; begin < end; ++begin) {
      const std::int64_t row = begin / tiles * 32;
      const std::int64_t column = begin % tiles * kTile<S>;
      const std::int64_t depth = std::min<std::int64_t>(32, weights.rows() - row);
      const std::int64_t count = std::min<std::int64_t>(kTile<S>, n - column);
      weights.dequantize(row, depth, column, count, values.data());
      for (std::int64_t k = 0; k < depth; ++k) {
        write(values.data() + k * kTile<S>, S{1}, nullptr, count, out, (row + k) * n + column);
      }
    }
  });
}

}  // namespace

void quantized_matmul_forward(Cpu, const QuantizedMatmulForward& args) {
  on_dtype(FloatTypes{}, args.y.dtype(), "quantized_matmul",
           [&]<class T>() { forward<Accumulate<T>>(args, write_line<Accumulate<T>, T>); });
}

void quantized_matmul_backward(Cpu, const QuantizedMatmulBackward& args) {
  on_dtype(FloatTypes{}, args.dx.dtype(), "quantized_matmul",
           [&]<class T>() { backward<Accumulate<T>>(args, write_line<Accumulate<T>, T>); });
}

void dequantize(Cpu, const Dequantize& args) {
  on_dtype(FloatTypes{}, args.out.dtype(), "dequantize",
           [&]<class T>() { dequantize_all<Accumulate<T>>(args, write_line<Accumulate<T>, T>); });
}

}  // namespace mica::kernels

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>

#include <mica/core/copy.h>
#include <mica/core/creation.h>
#include <mica/core/dispatch.h>
#include <mica/core/parallel.h>
#include <mica/ops/quantized/detail/quantized_functions.h>
#include <mica/ops/quantized/quantize_two_levels.h>
#include <mica/ops/quantized/quantized.h>

namespace mica {

namespace {

using Scales = Types<float, Float16, BFloat16>;

constexpr std::int64_t kStrip = 64;    // columns per strip
constexpr std::int64_t kGrain = 8192;  // minimum weights per thread

constexpr const char* kOp = "quantize";

/// The smallest T that is at least `value` ≥ 0.
template <class T>
T round_up(double value) {
  float nearest = static_cast<float>(value);
  if (nearest < value) {
    nearest = std::nextafter(nearest, INFINITY);
  }
  if constexpr (std::is_same_v<T, float>) {
    return nearest;
  } else {
    T result(nearest);
    if (static_cast<float>(result) < nearest) {
      ++result.bits;
    }
    return result;
  }
}

/// The largest T that is at most `value`.
template <class T>
T round_down(double value) {
  if (value < 0) {
    return T(-static_cast<float>(round_up<T>(-value)));
  }
  const T above = round_up<T>(value);
  if (static_cast<float>(above) == value) {
    return above;
  }
  if constexpr (std::is_same_v<T, float>) {
    return std::nextafter(above, -INFINITY);
  } else {
    T result = above;
    --result.bits;
    return result;
  }
}

// How one group is quantized: q = round((w − offset) / scale + shift). `scale` and `zero` are what is stored.
struct Grid {
  double scale;
  double zero;
  double shift;
  double offset;

  std::uint32_t quantize(double w, int most) const {
    const double q = scale > 0 ? (w - offset) / scale + shift : shift;
    return static_cast<std::uint32_t>(std::clamp(std::nearbyint(q), 0.0, static_cast<double>(most)));
  }
};

// The middle of [0, 2^bits), which represents the weight 0. With 1 bit it is not an integer, so that a weight of 0
// cannot be represented.
double symmetric_zero(int bits) { return bits == 1 ? 0.5 : 1 << (bits - 1); }

// Computes the Grid of a group; README.md has the formulas. Scales are rounded up to their dtype T, so that the
// integers cover the range of the weights.
template <class T>
Grid grid_of(double least, double greatest, const QuantizeOptions& options) {
  const auto scale_of = [](double range) { return static_cast<double>(static_cast<float>(round_up<T>(range))); };
  const int most = (1 << options.bits) - 1;
  Grid grid{};
  if (options.scheme == QuantizationScheme::symmetric) {
    grid.shift = symmetric_zero(options.bits);
    grid.scale = scale_of(std::max(-least, greatest) / (most - grid.shift));
    grid.zero = grid.shift;
  } else if (options.mode == QuantizationMode::fused_multiply_add) {
    grid.zero = static_cast<float>(round_down<T>(least));
    grid.offset = grid.zero;
    grid.scale = scale_of((greatest - grid.offset) / most);
  } else {
    least = std::min(least, 0.0);  // so that 0 can be represented exactly
    greatest = std::max(greatest, 0.0);
    grid.scale = scale_of((greatest - least) / most);
    const double zero = grid.scale > 0 ? -least / grid.scale : 0;
    // With 1 bit, an exact 0 matters more. Zeros of 8 bits are up to 255, so that 16-bit dtypes lack room for a
    // fraction.
    const bool rounds = options.scheme == QuantizationScheme::asymmetric || options.bits == 1 || options.bits == 8;
    grid.shift = rounds ? std::nearbyint(zero) : static_cast<float>(T(static_cast<float>(zero)));
    grid.zero = grid.shift;
  }
  return grid;
}

// The weights of a group in up to kStrip columns.
template <class W>
struct GroupStrip {
  const W* weights;
  std::int64_t leading;  // elements from one row to the next
  std::int64_t rows;
  std::int64_t columns;
  std::int32_t* words;

  /// Writes the smallest and the largest weight of each column. Returns false if a weight is not finite.
  bool range(double* least, double* greatest) const {
    std::fill(least, least + columns, INFINITY);
    std::fill(greatest, greatest + columns, -INFINITY);
    bool finite = true;
    for (std::int64_t k = 0; k < rows; ++k) {
      for (std::int64_t n = 0; n < columns; ++n) {
        const double w = weights[k * leading + n];
        finite = finite && std::isfinite(w);
        least[n] = std::min(least[n], w);
        greatest[n] = std::max(greatest[n], w);
      }
    }
    return finite;
  }

  void write(const Grid* grids, int bits) const {
    const int per_word = quantized::kWordBits / bits;
    const int most = (1 << bits) - 1;
    for (std::int64_t k = 0; k < rows; ++k) {
      std::int32_t* const line = words + k / per_word * leading;
      const int shift = static_cast<int>(k % per_word) * bits;
      for (std::int64_t n = 0; n < columns; ++n) {
        const std::uint32_t q = grids[n].quantize(weights[k * leading + n], most);
        line[n] = std::bit_cast<std::int32_t>(std::bit_cast<std::uint32_t>(line[n]) | q << shift);
      }
    }
  }
};

using GridOf = Grid (*)(double least, double greatest, const QuantizeOptions& options);

// Writes q.packed and, in float32, the scales and zeros; `zeros` may be null.
template <class W>
void quantize_groups(const Tensor& weight, const QuantizeOptions& options, GridOf grid_of, const QuantizedWeight& q,
                     float* scales, float* zeros) {
  const std::int64_t n = weight.size(1);
  const std::int64_t size = quantized::rows_of_group(q.rows, q.group_size);
  const std::int64_t strips = (n + kStrip - 1) / kStrip;
  const int per_word = quantized::kWordBits / q.bits;
  std::atomic<bool> finite{true};
  const std::int64_t grain = kGrain / (std::min(size, q.rows) * std::min(kStrip, n)) + 1;
  parallel_for(q.groups() * strips, grain, [&](std::int64_t begin, std::int64_t end) {
    std::array<double, kStrip> least, greatest;
    std::array<Grid, kStrip> grids;
    for (; begin < end; ++begin) {
      const std::int64_t group = begin / strips;
      const std::int64_t column = begin % strips * kStrip;
      const std::int64_t row = group * size;
      const GroupStrip<W> strip{.weights = weight.data<W>() + row * n + column,
                                .leading = n,
                                .rows = std::min(size, q.rows - row),
                                .columns = std::min(kStrip, n - column),
                                .words = q.packed.data<std::int32_t>() + row / per_word * n + column};
      bool good = strip.range(least.data(), greatest.data());
      for (std::int64_t c = 0; good && c < strip.columns; ++c) {
        grids[c] = grid_of(least[c], greatest[c], options);
        good = std::isfinite(grids[c].scale) && std::isfinite(grids[c].offset);
        scales[group * n + column + c] = static_cast<float>(grids[c].scale);
        if (zeros != nullptr) {
          zeros[group * n + column + c] = static_cast<float>(grids[c].zero);
        }
      }
      if (good) {
        strip.write(grids.data(), options.bits);
      } else {
        finite = false;
      }
    }
  });
  check(finite, "{}: expected finite weights whose scales and zeros fit {}", kOp, options.dtype);
}

constexpr const char* kTwoLevels = "quantize_two_levels";

/// The first level of non-negative values in `count` groups of a column: value ≈ level · factor, with the returned
/// factor. With `up`, at least the value.
double split_levels(const double* values, std::int64_t count, bool up, int* levels) {
  constexpr int kMost = 255 - quantized::kFactorZero;
  const double factor = static_cast<float>(round_up<BFloat16>(*std::max_element(values, values + count) / kMost));
  for (std::int64_t i = 0; i < count; ++i) {
    const double level = factor > 0 ? values[i] / factor : 0;
    levels[i] = static_cast<int>(std::min<double>(up ? std::ceil(level) : std::nearbyint(level), kMost));
  }
  return factor;
}

// Writes q's tensors, all of the weight's device.
template <class W>
void quantize_blocks(const Tensor& weight, const QuantizedWeight& q) {
  constexpr std::int64_t kMostGroups = quantized::kFactorRows / 16;
  const std::int64_t n = weight.size(1), size = q.group_size;
  const std::int64_t strips = (n + kStrip - 1) / kStrip;
  const std::int64_t blocks = quantized::groups_of(q.rows, quantized::kFactorRows);
  const int per_word = quantized::kWordBits / q.bits, most = (1 << q.bits) - 1;
  std::atomic<bool> finite{true};
  parallel_for(blocks * strips, 1, [&](std::int64_t begin, std::int64_t end) {
    std::array<std::array<double, kStrip>, kMostGroups> least, greatest;
    std::array<std::array<Grid, kStrip>, kMostGroups> grids;
    for (; begin < end; ++begin) {
      const std::int64_t block = begin / strips, column = begin % strips * kStrip,
                         columns = std::min(kStrip, n - column);
      const std::int64_t first = block * quantized::kFactorRows;
      const std::int64_t groups = quantized::groups_of(std::min(quantized::kFactorRows, q.rows - first), size);
      const auto strip_of = [&](std::int64_t group) {
        const std::int64_t row = first + group * size;
        return GroupStrip<W>{.weights = weight.data<W>() + row * n + column,
                             .leading = n,
                             .rows = std::min(size, q.rows - row),
                             .columns = columns,
                             .words = q.packed.data<std::int32_t>() + row / per_word * n + column};
      };
      bool good = true;
      for (std::int64_t g = 0; g < groups; ++g) {
        good = strip_of(g).range(least[g].data(), greatest[g].data()) && good;
      }
      for (std::int64_t c = 0; good && c < columns; ++c) {
        std::array<double, kMostGroups> scales, zeros;
        std::array<int, kMostGroups> scale_levels, zero_levels;
        for (std::int64_t g = 0; g < groups; ++g) {
          scales[g] = (std::max(greatest[g][c], 0.0) - std::min(least[g][c], 0.0)) / most;
        }
        const double scale_factor = split_levels(scales.data(), groups, true, scale_levels.data());
        for (std::int64_t g = 0; g < groups; ++g) {
          scales[g] = scale_levels[g] * scale_factor;
          zeros[g] = scales[g] > 0 ? -std::min(least[g][c], 0.0) / scales[g] : 0;
        }
        const double zero_factor = split_levels(zeros.data(), groups, false, zero_levels.data());
        good = std::isfinite(scale_factor);
        const std::int64_t at = block * n + column + c;
        q.scale_factor.data<BFloat16>()[at] = BFloat16(static_cast<float>(scale_factor));
        q.zero_factor.data<BFloat16>()[at] = BFloat16(static_cast<float>(zero_factor));
        for (std::int64_t g = 0; g < groups; ++g) {
          const std::int64_t of_group = (first / size + g) * n + column + c;
          q.scale.data<std::uint8_t>()[of_group] = static_cast<std::uint8_t>(quantized::kFactorZero + scale_levels[g]);
          q.zero.data<std::uint8_t>()[of_group] = static_cast<std::uint8_t>(quantized::kFactorZero + zero_levels[g]);
          grids[g][c] = {.scale = scales[g], .zero = 0, .shift = zero_levels[g] * zero_factor, .offset = 0};
        }
      }
      for (std::int64_t g = 0; good && g < groups; ++g) {
        strip_of(g).write(grids[g].data(), q.bits);
      }
      finite = finite && good;
    }
  });
  check(finite, "{}: expected finite weights whose scales fit bfloat16", kTwoLevels);
}

void check_options(const QuantizeOptions& options) {
  quantized::check_bits(kOp, options.bits);
  quantized::check_group_size(kOp, options.group_size, options.bits);
  quantized::check_mode(kOp, options.mode);
  check(options.scheme <= QuantizationScheme::fitted, "{}: expected the scheme asymmetric, symmetric or fitted, got {}",
        kOp, static_cast<int>(options.scheme));
  check(options.mode == QuantizationMode::scale_and_shift || options.mode == QuantizationMode::fused_multiply_add,
        "{}: expected the mode scale_and_shift or fused_multiply_add", kOp);
  check(options.scheme != QuantizationScheme::symmetric || options.mode == QuantizationMode::scale_and_shift,
        "{}: expected the mode scale_and_shift for the symmetric scheme", kOp);
  check(options.dtype == float32 || options.dtype == float16 || options.dtype == bfloat16,
        "{}: expected scales of float32, float16 or bfloat16, got {}", kOp, options.dtype);
}

Tensor to_device(const Tensor& x, Device device) {
  if (x.device() == device) {
    return x;
  }
  const Tensor result = empty(x.shape(), x.dtype(), device);
  copy_into(result, x);
  return result;
}

Tensor in_dtype(const Tensor& x, DType dtype) {
  if (x.dtype() == dtype) {
    return x;
  }
  const Tensor result = empty(x.shape(), dtype);
  copy_into(result, x);
  return result;
}

}  // namespace

QuantizedWeight quantize(const Tensor& weight, QuantizeOptions options) {
  check_options(options);
  check(weight.defined() && weight.dim() == 2 && is_floating(weight.dtype()),
        "{}: expected a floating weight of shape (K, N), got {}", kOp, quantized::described(weight));
  const Tensor host = contiguous_data(to_device(weight, Device::cpu()));
  QuantizedWeight q{.rows = host.size(0), .bits = options.bits, .group_size = options.group_size, .mode = options.mode};
  const Shape per_group{q.groups(), host.size(1)};
  const bool symmetric = options.scheme == QuantizationScheme::symmetric;
  q.packed = zeros({quantized::words_of(q.rows, q.bits), host.size(1)}, int32);
  // Scales and zeros were already rounded to the dtype, so that float32 represents them exactly.
  const Tensor scale = empty(per_group, float32);
  const Tensor zero = symmetric ? full({}, symmetric_zero(options.bits), float32) : empty(per_group, float32);
  if (host.numel() > 0) {
    GridOf grid = nullptr;
    on_dtype(Scales{}, options.dtype, kOp, [&]<class T>() { grid = grid_of<T>; });
    on_dtype(FloatTypes{}, host.dtype(), kOp, [&]<class W>() {
      quantize_groups<W>(host, options, grid, q, scale.data<float>(), symmetric ? nullptr : zero.data<float>());
    });
  }
  q.scale = in_dtype(scale, options.dtype);
  q.zero = in_dtype(zero, options.dtype);
  for (Tensor* part : {&q.packed, &q.scale, &q.zero}) {
    *part = to_device(*part, weight.device());
  }
  return q;
}

QuantizedWeight quantize_two_levels(const Tensor& weight, TwoLevelOptions options) {
  check(options.bits == 4 || options.bits == 2, "{}: expected 4 or 2 bits, got {}", kTwoLevels, options.bits);
  check(options.group_size != kWholeColumn, "{}: expected groups of 16, 32, 64 or 128, got whole columns", kTwoLevels);
  quantized::check_group_size(kTwoLevels, options.group_size, options.bits);
  check(weight.defined() && weight.dim() == 2 && is_floating(weight.dtype()),
        "{}: expected a floating weight of shape (K, N), got {}", kTwoLevels, quantized::described(weight));
  const Tensor host = contiguous_data(to_device(weight, Device::cpu()));
  const std::int64_t columns = host.size(1);
  QuantizedWeight q{.rows = host.size(0), .bits = options.bits, .group_size = options.group_size};
  q.packed = zeros({quantized::words_of(q.rows, q.bits), columns}, int32);
  q.scale = empty({q.groups(), columns}, uint8);
  q.zero = empty({q.groups(), columns}, uint8);
  const Shape blocks{quantized::groups_of(q.rows, quantized::kFactorRows), columns};
  q.scale_factor = empty(blocks, bfloat16);
  q.zero_factor = empty(blocks, bfloat16);
  if (host.numel() > 0) {
    on_dtype(FloatTypes{}, host.dtype(), kTwoLevels, [&]<class W>() { quantize_blocks<W>(host, q); });
  }
  for (const auto& [name, part] : quantized_parts()) {
    q.*part = to_device(q.*part, weight.device());
  }
  return q;
}

Tensor pack_bits(const Tensor& values, int bits) {
  quantized::check_bits("pack_bits", bits);
  check(values.defined() && values.dim() == 2 && values.device().is_cpu(),
        "pack_bits: expected values of shape (K, N) on the cpu, got {}", quantized::described(values));
  const std::int64_t rows = values.size(0);
  const std::int64_t columns = values.size(1);
  const int per_word = quantized::kWordBits / bits;
  const Tensor packed = zeros({quantized::words_of(rows, bits), columns}, int32);
  on_dtype(IntegerTypes{}, values.dtype(), "pack_bits", [&]<class T>() {
    const Tensor ready = contiguous_data(values);
    const T* const from = ready.data<T>();
    std::int32_t* const to = packed.data<std::int32_t>();
    for (std::int64_t i = 0; i < rows * columns; ++i) {
      const std::int64_t k = i / columns;
      const auto value = static_cast<std::int64_t>(from[i]);
      check(value >= 0 && value < (1 << bits), "pack_bits: expected values from 0 to {}, got {}", (1 << bits) - 1,
            value);
      std::int32_t& word = to[k / per_word * columns + i % columns];
      word = std::bit_cast<std::int32_t>(std::bit_cast<std::uint32_t>(word) | static_cast<std::uint32_t>(value)
                                                                                  << (k % per_word * bits));
    }
  });
  return packed;
}

Tensor unpack_bits(const Tensor& packed, int bits, std::int64_t rows) {
  quantized::check_bits("unpack_bits", bits);
  check(packed.defined() && packed.dtype() == int32 && packed.dim() == 2 && packed.device().is_cpu(),
        "unpack_bits: expected an int32 matrix on the cpu, got {}", quantized::described(packed));
  check(rows >= 0, "unpack_bits: expected rows >= 0, got {}", rows);
  check(packed.size(0) == quantized::words_of(rows, bits),
        "unpack_bits: expected a matrix of shape [{}, N] for {} rows of {} bits, got {}",
        quantized::words_of(rows, bits), rows, bits, packed.shape());
  const std::int64_t columns = packed.size(1);
  const int per_word = quantized::kWordBits / bits;
  const Tensor values = empty({rows, columns}, uint8);
  const Tensor ready = contiguous_data(packed);
  const std::int32_t* const from = ready.data<std::int32_t>();
  std::uint8_t* const to = values.data<std::uint8_t>();
  for (std::int64_t i = 0; i < rows * columns; ++i) {
    const std::int64_t k = i / columns;
    const auto word = std::bit_cast<std::uint32_t>(from[k / per_word * columns + i % columns]);
    to[i] = static_cast<std::uint8_t>(word >> (k % per_word * bits) & ((1u << bits) - 1));
  }
  return values;
}

}  // namespace mica

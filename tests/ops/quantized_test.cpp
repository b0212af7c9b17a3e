#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "norm_grid.h"
#include "tests/depth.h"
#include "tests/launches.h"
#include "tests/ops/quantized_formats.h"
#include "tests/support.h"
#include <mica/autograd/grad.h>
#include <mica/autograd/grad_mode.h>
#include <mica/autograd/gradcheck.h>
#include <mica/core/parallel.h>
#include <mica/core/rng.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/index/index.h>
#include <mica/ops/join/join.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/ops/quantized/detail/few_rows.h>
#include <mica/ops/quantized/quantized.h>
#include <mica/ops/quantized/round_activations.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace quantized_test {

using Mode = QuantizationMode;
using Doubles = std::vector<double>;

const std::vector<Mode> kModes = {Mode::packed, Mode::shift, Mode::scale, Mode::scale_and_shift,
                                  Mode::fused_multiply_add};
const std::vector<DType> kDtypes = {float32, float64, float16, bfloat16};

bool has_scale(Mode mode) { return mode != Mode::packed && mode != Mode::shift; }
bool has_zero(Mode mode) { return mode != Mode::packed && mode != Mode::scale; }

struct Format {
  std::int64_t rows;
  std::int64_t columns;
  int bits = 4;
  std::int64_t group_size = 64;
  Mode mode = Mode::scale_and_shift;
  bool one_zero = false;
  DType dtype = float32;  // of scale and zero, or of their factors
  bool two_levels = false;

  std::string text() const {
    return fmt::format("{}x{}, {} bits, groups of {}, mode {}{}, factors of {}{}", rows, columns, bits, group_size,
                       static_cast<int>(mode), one_zero ? ", one zero" : "", dtype, two_levels ? ", two levels" : "");
  }
};

// A weight with random integers, scales and zeros, and the matrix that it represents, in float64.
struct Example {
  QuantizedWeight q;
  Doubles weight;
};

// Random scales or zeros of two levels, and their values.
Doubles random_levels(const Format& f, std::int64_t groups, Device device, Tensor& first, Tensor& factor) {
  const Tensor levels = randint(0, 256, {groups, f.columns}, uint8);
  const Tensor factors = randn({(f.rows + 255) / 256, f.columns}, f.dtype) * 0.01;
  const Doubles by = to_vector<double>(factors);
  Doubles values = to_vector<double>(levels);
  for (std::int64_t i = 0; i < groups * f.columns; ++i) {
    const std::int64_t row = i / f.columns * f.group_size;
    values[i] = (values[i] - 128) * by[row / 256 * f.columns + i % f.columns];
  }
  first = levels.to(device);
  factor = factors.to(device);
  return values;
}

Example random_weight(const Format& f, Device device = Device::cpu()) {
  const Tensor values = randint(0, 1 << f.bits, {f.rows, f.columns}, uint8);
  const std::int64_t size = f.group_size == kWholeColumn ? std::max<std::int64_t>(f.rows, 1) : f.group_size;
  const std::int64_t groups = (f.rows + size - 1) / size;
  Example example{.q = {.packed = pack_bits(values, f.bits).to(device),
                        .rows = f.rows,
                        .bits = f.bits,
                        .group_size = f.group_size,
                        .mode = f.mode},
                  .weight = {}};
  Doubles scale(groups * f.columns, 1), shift(groups * f.columns, 0), offset = shift;
  if (has_scale(f.mode) && f.two_levels) {
    scale = random_levels(f, groups, device, example.q.scale, example.q.scale_factor);
  } else if (has_scale(f.mode)) {
    example.q.scale = (rand({groups, f.columns}, f.dtype)).to(device);
    scale = to_vector<double>(example.q.scale);
  }
  if (has_zero(f.mode) && f.two_levels && !f.one_zero) {
    (f.mode == Mode::fused_multiply_add ? offset : shift) =
        random_levels(f, groups, device, example.q.zero, example.q.zero_factor);
  } else if (has_zero(f.mode)) {
    example.q.zero = (f.one_zero ? randn({}, f.dtype) : randn({groups, f.columns}, f.dtype)).to(device);
    Doubles zero = to_vector<double>(example.q.zero);
    zero.resize(groups * f.columns, f.one_zero ? zero[0] : 0);
    (f.mode == Mode::fused_multiply_add ? offset : shift) = zero;
  }
  const Doubles integers = to_vector<double>(values);
  for (std::int64_t k = 0; k < f.rows; ++k) {
    for (std::int64_t n = 0; n < f.columns; ++n) {
      const std::int64_t at = k / size * f.columns + n;
      example.weight.push_back((integers[k * f.columns + n] - shift[at]) * scale[at] + offset[at]);
    }
  }
  return example;
}

// The expected product, and the sizes of its terms, to which rounding errors are proportional.
struct Expected {
  Doubles values;
  Doubles scales;
};

/// rows · a (m, depth) · b · columns, with b (depth, n), or (n, depth) if transposed.
Expected multiply(const Doubles& a, const Doubles& b, std::int64_t m, std::int64_t n, std::int64_t depth,
                  bool transposed) {
  Expected result;
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      double sum = 0;
      double size = 0;
      // Pointers, since tests are not optimized.
      const double *const row = a.data() + i * depth, *const column = b.data() + (transposed ? j * depth : j);
      const std::int64_t step = transposed ? 1 : n;
      for (std::int64_t k = 0; k < depth; ++k) {
        const double term = row[k] * column[k * step];
        sum += term;
        size += std::abs(term);
      }
      result.values.push_back(sum);
      result.scales.push_back(size);
    }
  }
  return result;
}

void scale_by(Expected& e, std::size_t i, double factor) {
  e.values[i] *= factor;
  e.scales[i] *= std::abs(factor);
}

// On a GPU, gradients, and products of more rows than this, use the weight rounded to x's dtype. They also round before
// they multiply by the rows' factors.
constexpr std::int64_t kFewRows = 16;

// On a CPU with instructions for bfloat16, products of this many rows or more use the weight rounded to bfloat16.
constexpr std::int64_t kTileRows = 32;

bool rounds_weights(DType dtype, std::int64_t m, Device device) {
  return device.is_cuda() ? m > kFewRows : dtype == bfloat16 && m >= kTileRows && has_fast_bfloat16(device);
}

double tolerance(DType dtype, bool rounds_weights) {
  if (rounds_weights && size_of(dtype) == 2) {
    return 1.02 * epsilon_of(dtype);
  }
  return dtype == float64 ? 1e-14 : 2e-6;
}

void expect_matches(const Example& example, std::int64_t m, DType dtype, bool by_column, bool by_row,
                    const std::string& what, Device device = Device::cpu()) {
  const std::int64_t depth = example.q.rows;
  const std::int64_t n = example.q.columns();
  const Tensor x = randn({m, depth}, dtype, device).requires_grad_();
  const Tensor dy = randn({m, n}, dtype, device);
  const ChannelScales channels{.columns = by_column ? randn({n}, float32, device) : Tensor{},
                               .rows = by_row ? randn({m}, float32, device) : Tensor{}};
  const Tensor y = quantized_matmul(x, example.q, channels);
  y.backward(dy);
  ASSERT_EQ(y.dtype(), dtype) << what;
  ASSERT_EQ(y.shape(), (Shape{m, n})) << what;

  const Doubles columns = by_column ? to_vector<double>(channels.columns) : Doubles(n, 1);
  const Doubles rows = by_row ? to_vector<double>(channels.rows) : Doubles(m, 1);
  Expected forward = multiply(to_vector<double>(x), example.weight, m, n, depth, false);
  Doubles scaled = to_vector<double>(dy);
  for (std::int64_t i = 0; i < m * n; ++i) {
    scale_by(forward, i, columns[i % n] * rows[i / n]);
    scaled[i] *= columns[i % n];
  }
  expect_rows_close(y, forward.values, forward.scales, 1, tolerance(dtype, rounds_weights(dtype, m, device)),
                    what + ", y");
  Expected backward = multiply(scaled, example.weight, m, depth, n, true);
  for (std::int64_t i = 0; i < m * depth; ++i) {
    scale_by(backward, i, rows[i / depth]);
  }
  expect_rows_close(x.grad(), backward.values, backward.scales, 1, tolerance(dtype, device.is_cuda()), what + ", dx");
}

TEST(QuantizedMatmul, EveryFormat) {
  manual_seed(1);
  for (const Device device : test_devices()) {
    for (const int bits : kBits) {
      for (const std::int64_t group_size : kGroupSizes) {
        for (const Mode mode : kModes) {
          for (const bool one_zero : {false, true}) {
            if (one_zero && !has_zero(mode)) {
              continue;
            }
            const Format format{150, 37, bits, group_size, mode, one_zero};
            const Example example = random_weight(format, device);
            for (const DType dtype : kDtypes) {
              for (int channels = 0; channels < 4; ++channels) {
                expect_matches(example, 2, dtype, channels & 1, channels & 2,
                               fmt::format("{}, {} on {}, channels {}", format.text(), dtype, device, channels),
                               device);
                if (HasFatalFailure()) {
                  return;
                }
              }
            }
          }
        }
      }
    }
  }
}

TEST(QuantizedMatmul, AnySizes) {
  manual_seed(2);
  const std::vector<std::pair<std::int64_t, std::int64_t>> sizes = {
      {1, 1}, {1, 40}, {7, 1}, {31, 33}, {32, 32}, {33, 31}, {129, 65}, {513, 16}, {1025, 7}, {600, 530}, {2000, 4}};
  OneIn three(3);
  for (const Device device : test_devices()) {
    int turn = 0;
    for (const int bits : kBits) {
      for (const auto& [rows, columns] : sizes) {
        for (const std::int64_t group_size : {std::int64_t{32}, std::int64_t{128}, kWholeColumn}) {
          if (three.skips()) {
            continue;
          }
          const Format format{rows, columns, bits, group_size};
          const Example example = random_weight(format, device);
          // Each weight is multiplied by x of every fourth pair of rows and dtype, so that each pair gets its turn.
          for (const std::int64_t m : {1, 2, 4, 11, 17}) {
            for (const DType dtype : {float32, float16, bfloat16}) {
              if (turn++ % 4 != 0) {
                continue;
              }
              expect_matches(example, m, dtype, true, false,
                             fmt::format("{}, M = {}, {} on {}", format.text(), m, dtype, device), device);
              if (HasFatalFailure()) {
                return;
              }
            }
          }
        }
      }
    }
    for (const int bits : kBits) {
      for (int channels = 0; channels < 4; ++channels) {
        const Format format{150, 77, bits, 64};
        expect_matches(random_weight(format, device), 45, bfloat16, channels & 1, channels & 2,
                       fmt::format("{}, 45 rows on {}, channels {}", format.text(), device, channels), device);
      }
    }
    // More rows of the weight than a block processes at a time.
    const Format format{70, 45, 4, 32};
    expect_matches(random_weight(format, device), 519, float32, true, true, "many rows", device);
  }
}

TEST(QuantizedMatmul, FactorsOfAnyFloatingType) {
  manual_seed(3);
  for (const Device device : test_devices()) {
    for (const DType dtype : kDtypes) {
      for (const Mode mode : kModes) {
        const Format format{100, 20, 4, 32, mode, false, dtype};
        expect_matches(random_weight(format, device), 3, float32, false, false, format.text(), device);
      }
    }
  }
}

// The formats of GGUF's K-quants: groups of 16, and scales and zeros of two levels.
TEST(QuantizedMatmul, SmallGroupsAndTwoLevels) {
  manual_seed(31);
  for (const Device device : test_devices()) {
    int turn = 0;
    for (const auto& [bits, group_size, two_levels] :
         {std::tuple{8, 16, false}, {4, 16, true}, {2, 16, true}, {8, 16, true}, {4, 32, true}, {1, 64, true}}) {
      for (const auto& [rows, columns] : {std::pair{1, 3}, {48, 40}, {272, 33}, {530, 136}}) {
        const Mode mode = kModes[static_cast<std::size_t>(1 + turn % 4)];
        const Format format{rows,
                            columns,
                            bits,
                            group_size,
                            mode,
                            has_zero(mode) && turn % 3 == 0,
                            kDtypes[static_cast<std::size_t>(turn % 4)],
                            two_levels};
        const Example example = random_weight(format, device);
        for (const std::int64_t m : {1, 3, 9, 40}) {
          const DType dtype = kDtypes[static_cast<std::size_t>(turn++ % 4)];
          expect_matches(example, m, dtype, turn % 2 == 0, false,
                         fmt::format("{}, M = {}, {} on {}", format.text(), m, dtype, device), device);
          if (HasFatalFailure()) {
            return;
          }
        }
        ++turn;  // so that modes and dtypes do not alternate in step
        expect_close(dequantize(example.q, float64), example.weight, 1e-14, 1e-14);
      }
    }
  }
}

// Rows (M, K) rounded as RoundActivations says.
Doubles rounded_rows(const Tensor& x, std::int64_t chunk) {
  Doubles result;
  const std::int64_t depth = x.size(1);
  for (std::int64_t at = 0; at < x.numel(); at += depth) {
    const float* const row = x.data<float>() + at;
    for (std::int64_t begin = 0; begin < depth; begin += chunk) {
      const std::int64_t end = std::min(begin + chunk, depth);
      float most = 0;
      for (std::int64_t k = begin; k < end; ++k) {
        most = std::max(most, std::abs(row[k]));
      }
      for (std::int64_t k = begin; k < end; ++k) {
        result.push_back(static_cast<double>(std::nearbyint(row[k] * (127 / most))) * most / 127);
      }
    }
  }
  return result;
}

TEST(QuantizedMatmul, RoundedActivations) {
  if (!kernels::has_integer_products()) {
    GTEST_SKIP() << "this CPU has no products of bytes";
  }
  manual_seed(32);
  int turn = 0;
  for (const int bits : kBits) {
    for (const std::int64_t group_size : {std::int64_t{16}, std::int64_t{32}, std::int64_t{64}, kWholeColumn}) {
      if (bits == 1 && group_size == 16) {
        continue;
      }
      for (const auto& [depth, columns] : {std::pair{1, 3}, {64, 32}, {144, 45}, {530, 136}}) {
        const Mode mode = kModes[static_cast<std::size_t>(turn % 5)];
        const Format format{depth,
                            columns,
                            bits,
                            group_size,
                            mode,
                            has_zero(mode) && turn % 3 == 0,
                            turn % 2 == 0 ? float16 : float32,
                            group_size != kWholeColumn && turn % 4 == 0};
        const Example example = random_weight(format);
        const std::int64_t m = 1 + turn++ % 8;
        const Tensor x = randn({m, depth});
        const Expected exact = multiply(to_vector<double>(x), example.weight, m, columns, depth, false);
        const Expected rounded =
            multiply(rounded_rows(x, group_size == 16 ? 16 : 32), example.weight, m, columns, depth, false);
        const RoundActivations guard;
        const Tensor y = quantized_matmul(x, example.q);
        expect_rows_close(y, rounded.values, rounded.scales, 1, 2e-6, format.text());
        expect_same_bits(quantized_matmul(slice(x, 0, m - 1, m), example.q), slice(y, 0, m - 1, m), format.text());
        const Tensor many = quantized_matmul(cat({x, zeros({9, depth})}), example.q);  // too many to be rounded
        expect_rows_close(slice(many, 0, 0, m), exact.values, exact.scales, 1, 2e-6, format.text());
        if (HasFatalFailure()) {
          return;
        }
      }
    }
  }
}

TEST(QuantizedMatmul, RoundedActivationsThatAreNotFinite) {
  manual_seed(33);
  const RoundActivations guard;
  const QuantizedWeight q = quantize(randn({96, 20}));
  const Tensor x = randn({4, 96});
  const Tensor before = quantized_matmul(x, q);
  float* const data = x.data<float>();
  data[40] = NAN;
  data[96 + 95] = -INFINITY;
  std::fill_n(data + 3 * 96, 96, 1e-38F);
  const Tensor y = quantized_matmul(x, q);
  for (std::int64_t i = 0; i < 40; ++i) {
    EXPECT_FALSE(std::isfinite(y.data<float>()[i])) << i;
    EXPECT_LT(std::abs(y.data<float>()[60 + i % 20]), 1e-34);
  }
  expect_same_bits(slice(y, 0, 2, 3), slice(before, 0, 2, 3));
}

TEST(QuantizedEmbedding, IsColumnsOfTheWeight) {
  manual_seed(32);
  for (const Device device : test_devices()) {
    for (const bool two_levels : {false, true}) {
      const Format format{272, 10, 4, 32, Mode::fused_multiply_add, false, float16, two_levels};
      const QuantizedWeight q = random_weight(format, device).q;
      const Tensor indices = from_data<std::int64_t>({9, 0, 3, 3, 0, 1}, {2, 3}).to(device);
      const Tensor y = quantized_embedding(q, indices, bfloat16);
      EXPECT_EQ(y.shape(), (Shape{2, 3, 272}));
      const Tensor expected = index_select(transpose(dequantize(q, bfloat16), 0, 1), 0, reshape(indices, {6}));
      expect_same_bits(reshape(y, {6, 272}), expected, "");
      EXPECT_EQ(quantized_embedding(q, zeros({0, 2}, int32, device), float32).shape(), (Shape{0, 2, 272}));
      expect_error([&] { quantized_embedding(q, zeros({2}, float32, device), float32); },
                   "quantized_embedding: expected indices of int64 or int32");
    }
  }
  const QuantizedWeight q = random_weight({70, 6}).q;
  expect_error([&] { quantized_embedding(q, from_data<std::int64_t>({6}, {1}), float32); }, "6");
}

TEST(QuantizedMatmul, LeadingAxesAndLayouts) {
  manual_seed(4);
  for (const Device device : test_devices()) {
    const Example example = random_weight({70, 33}, device);
    const Tensor x = randn({6, 70}, float32, device);
    const Tensor rows = randn({6}, float32, device);
    const Tensor expected = quantized_matmul(x, example.q, {.rows = rows});
    const Tensor y = quantized_matmul(reshape(x, {2, 3, 70}), example.q, {.rows = reshape(rows, {2, 3})});
    EXPECT_EQ(y.shape(), (Shape{2, 3, 33}));
    expect_same_bits(reshape(y, {6, 33}), expected);
    for (const auto layout : {with_gaps, off_by_one}) {
      QuantizedWeight q = example.q;
      q.scale = layout(q.scale);
      q.zero = layout(q.zero);
      q.packed = transpose(contiguous(transpose(q.packed, 0, 1)), 0, 1);
      expect_same_bits(quantized_matmul(layout(x), q, {.rows = rows}), expected);
      expect_same_bits(dequantize(q), dequantize(example.q));
    }
    // The product of a vector equals one row of a larger product.
    const Tensor row = select(x, 0, 4);
    const Tensor of_row = quantized_matmul(row, example.q, {.rows = select(rows, 0, 4)});
    EXPECT_EQ(of_row.shape(), (Shape{33}));
    expect_same_bits(of_row, contiguous(select(expected, 0, 4)));
  }
}

TEST(QuantizedMatmul, IsAProductWithTheDequantizedWeight) {
  manual_seed(5);
  for (const Device device : test_devices()) {
    for (const int bits : kBits) {
      for (const Mode mode : kModes) {
        const Example example = random_weight({96, 40, bits, 32, mode}, device);
        expect_close(dequantize(example.q, float64), example.weight, 1e-14, 1e-14);
        expect_close(dequantize(example.q), example.weight, 1e-6, 1e-5);
        const Tensor half = dequantize(example.q, float16);
        EXPECT_EQ(half.dtype(), float16);
        expect_same_bits(half, dequantize(example.q).to(float16));
        const Tensor x = randn({5, 96}, float64, device);
        expect_close(quantized_matmul(x, example.q), matmul(x, dequantize(example.q, float64)), 1e-12, 1e-12);
      }
    }
  }
}

TEST(QuantizedMatmul, IgnoresBitsPastTheLastRow) {
  manual_seed(12);
  for (const int bits : kBits) {
    for (const std::int64_t group_size : kGroupSizes) {
      const std::int64_t rows = 161;  // the last word has a single integer
      const QuantizedWeight q = random_weight({rows, 20, bits, group_size}).q;
      QuantizedWeight dirty = q;
      std::vector<std::int32_t> words = to_vector<std::int32_t>(q.packed);
      for (std::size_t i = words.size() - 20; i < words.size(); ++i) {
        words[i] = static_cast<std::int32_t>(static_cast<std::uint32_t>(words[i]) | ~0u << bits);
      }
      dirty.packed = from_data(words, q.packed.shape());
      const Tensor x = randn({3, rows}).requires_grad_();
      const Tensor dy = randn({3, 20});
      std::vector<Tensor> results;
      for (const QuantizedWeight& weight : {q, dirty}) {
        const Tensor y = quantized_matmul(x, weight);
        results.insert(results.end(), {y.detach(), autograd::grad({y}, {x}, {dy})[0], dequantize(weight)});
      }
      for (int i = 0; i < 3; ++i) {
        expect_same_bits(results[3 + i], results[i]);
      }
    }
  }
}

TEST(QuantizedMatmul, SameBitsForAnyNumberOfThreads) {
  manual_seed(6);
  const Example example = random_weight({1100, 333, 4, 128});
  const Tensor weight = randn({1100, 333});
  const int threads = num_threads();
  for (const std::int64_t m : {1, 40, 600}) {
    const Tensor x = randn({m, 1100}, bfloat16);
    const Tensor dy = randn({m, 333}, bfloat16);
    std::vector<Tensor> results;
    for (const int n : {1, 2, 5}) {
      set_num_threads(n);
      const Tensor leaf = x.detach().requires_grad_();
      const Tensor y = quantized_matmul(leaf, example.q);
      y.backward(dy);
      const QuantizedWeight q = quantize(weight);
      results.insert(results.end(), {y.detach(), leaf.grad(), q.packed, q.scale, q.zero, dequantize(q)});
    }
    set_num_threads(threads);
    for (std::size_t i = 6; i < results.size(); ++i) {
      expect_same_bits(results[i], results[i % 6], fmt::format("M = {}, result {}", m, i));
    }
  }
}

TEST(QuantizedMatmul, Gradients) {
  manual_seed(7);
  for (const Device device : test_devices()) {
    for (const int bits : kBits) {
      for (const Mode mode : kModes) {
        const Example example = random_weight({37, 5, bits, 32, mode}, device);
        const ChannelScales channels{.columns = randn({5}, float64, device), .rows = randn({3}, float64, device)};
        const auto f = [&](const Tensor& x) { return quantized_matmul(x, example.q, channels); };
        EXPECT_TRUE(autograd::gradcheck(f, {randn({3, 37}, float64, device)}));
        EXPECT_TRUE(autograd::gradgradcheck(f, {randn({3, 37}, float64, device)}));
      }
    }
  }
}

// Sums are computed by several blocks. Their order must not depend on timing.
TEST(QuantizedMatmul, LongSumsRepeat) {
  manual_seed(13);
  for (const Device device : test_devices()) {
    for (const int bits : kBits) {
      const Example example = random_weight({7001, 132, bits, 128}, device);
      expect_matches(example, 5, bfloat16, true, true, fmt::format("{} bits on {}", bits, device), device);
      const Tensor x = randn({5, 7001}, bfloat16, device);
      const Tensor first = quantized_matmul(x, example.q);
      for (int i = 0; i < 5; ++i) {
        expect_same_bits(quantized_matmul(x, example.q), first);
      }
      // A row does not depend on other rows.
      expect_same_bits(quantized_matmul(contiguous(select(x, 0, 3)), example.q), contiguous(select(first, 0, 3)));
    }
  }
}

// Like expect_matches(), but without the gradient, and with a reference by matmul(), which is faster for many rows.
void expect_forward_matches(const QuantizedWeight& q, std::int64_t m, DType dtype, int channels,
                            const std::string& what) {
  const Device device = q.packed.device();
  const std::int64_t n = q.columns();
  const Tensor x = randn({m, q.rows}, dtype, device) * 0.0625;
  const Tensor columns = channels & 1 ? randn({n}, float32, device) : Tensor{};
  const Tensor rows = channels & 2 ? randn({m}, float32, device) : Tensor{};
  const cuda::LaunchRecord record;
  const Tensor y = quantized_matmul(x, q, {.columns = columns, .rows = rows});
  // The kernels for tensor cores need multiples of 32 rows and 8 columns of the weight.
  const bool on_tensor_cores = gpu_has_clusters() && q.rows % 32 == 0 && n % 8 == 0;
  if (on_tensor_cores && m <= 16) {
    expect_launched(record, device, {"few_rows_tensor_kernel"}, what);
  } else if (on_tensor_cores && gpu_has_wgmma()) {
    expect_launched(record, device, {"many_rows_tensor_kernel"}, what);
  } else {
    expect_launched(record, device, {m <= kFewRows ? "few_rows_kernel" : "dequantize_kernel"}, what);
  }

  const Tensor wide = x.to(float64);
  const Tensor weight = dequantize(q, float64);
  Tensor values = matmul(wide, weight);
  Tensor sizes = matmul(abs(wide), abs(weight));
  for (const Tensor& factors : {columns, rows.defined() ? reshape(rows, {m, 1}) : rows}) {
    if (factors.defined()) {
      values = values * factors.to(float64);
      sizes = sizes * abs(factors.to(float64));
    }
  }
  expect_rows_close(y, to_vector<double>(values), to_vector<double>(sizes), 1, tolerance(dtype, m > kFewRows), what);
  expect_same_bits(quantized_matmul(x, q, {.columns = columns, .rows = rows}), y, what);
}

// Numbers of rows around each kernel's limits.
const std::vector<std::int64_t> kManyRows = {1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 300};

class QuantizedMatmulKernels : public testing::TestWithParam<std::tuple<int, std::int64_t>> {};  // bits, group size

TEST_P(QuantizedMatmulKernels, EveryFormatAndSize) {
  if (!cuda_available()) {
    GTEST_SKIP() << "no GPU";
  }
  const auto [bits, group_size] = GetParam();
  manual_seed(14);
  const std::vector<std::pair<std::int64_t, std::int64_t>> sizes = {{32, 8},    {64, 128},   {96, 136}, {320, 72},
                                                                    {544, 264}, {1056, 120}, {100, 40}, {128, 12}};
  // Sizes, dtypes and channel scales alternate.
  std::size_t count = static_cast<std::size_t>(bits) + static_cast<std::size_t>(group_size % 31);
  for (const Mode mode : kModes) {
    for (const bool one_zero : {false, true}) {
      const auto [rows, columns] = sizes[count++ % sizes.size()];
      const Format format{rows, columns, bits, group_size, mode, one_zero && has_zero(mode), kDtypes[count % 4]};
      const QuantizedWeight q = random_weight(format, Device::cuda()).q;
      for (const DType dtype : {float16, bfloat16}) {
        for (const std::int64_t m : kManyRows) {
          const int channels = static_cast<int>(count++ % 4);
          expect_forward_matches(q, m, dtype, channels,
                                 fmt::format("{}, M = {}, {}, channels {}", format.text(), m, dtype, channels));
          if (HasFatalFailure()) {
            return;
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, QuantizedMatmulKernels,
                         testing::Combine(testing::ValuesIn(kBits), testing::ValuesIn(kGroupSizes)));

// Sizes for which a kernel reuses all of its shared memory many times, in several blocks, whose order must not matter.
TEST(QuantizedMatmul, EveryKernelRepeats) {
  if (!cuda_available()) {
    GTEST_SKIP() << "no GPU";
  }
  manual_seed(15);
  for (const int bits : kBits) {
    for (const auto& [rows, columns] : std::vector<std::pair<std::int64_t, std::int64_t>>{{16416, 72}, {4096, 1032}}) {
      const Format format{rows, columns, bits, 64, Mode::scale_and_shift, false, bfloat16};
      const QuantizedWeight q = random_weight(format, Device::cuda()).q;
      for (const DType dtype : {float16, bfloat16}) {
        for (const std::int64_t m : kManyRows) {
          const std::string what = fmt::format("{}, M = {}, {}", format.text(), m, dtype);
          expect_forward_matches(q, m, dtype, 1, what);
          const Tensor x = randn({m, rows}, dtype, Device::cuda()) * 0.0625;
          const Tensor first = quantized_matmul(x, q);
          for (int i = 0; i < 8; ++i) {
            expect_same_bits(quantized_matmul(x, q), first, what);
          }
        }
      }
    }
  }
}

TEST(QuantizedMatmul, OnTheGpuOfItsTensors) {
  if (cuda_device_count() < 2) {
    GTEST_SKIP() << "fewer than two GPUs";
  }
  manual_seed(16);
  for (const int i : {0, 1, 0}) {
    const QuantizedWeight q = random_weight({512, 264}, Device::cuda(i)).q;
    for (const std::int64_t m : kManyRows) {
      expect_forward_matches(q, m, bfloat16, 3, fmt::format("M = {} on GPU {}", m, i));
    }
  }
}

TEST(QuantizedMatmul, Empty) {
  for (const auto& [m, rows, columns] :
       std::vector<std::array<std::int64_t, 3>>{{0, 40, 3}, {2, 0, 3}, {2, 40, 0}, {0, 0, 0}}) {
    for (const std::int64_t group_size : kGroupSizes) {
      const QuantizedWeight q = quantize(ones({rows, columns}), {.group_size = group_size});
      EXPECT_EQ(dequantize(q).shape(), (Shape{rows, columns}));
      const Tensor x = ones({m, rows}).requires_grad_();
      const Tensor y = quantized_matmul(x, q);
      EXPECT_EQ(y.shape(), (Shape{m, columns}));
      expect_close(y, Doubles(m * columns, 0), 0, 0);
      y.backward(ones({m, columns}));
      expect_close(x.grad(), Doubles(m * rows, 0), 0, 0);
    }
  }
}

TEST(QuantizedWeight, GroupsOfInvalidSizes) {
  EXPECT_EQ((QuantizedWeight{.rows = INT64_MAX, .group_size = 32}.groups()), std::int64_t{1} << 58);
  EXPECT_EQ((QuantizedWeight{.rows = INT64_MAX, .group_size = kWholeColumn}.groups()), 1);
  expect_error([] { QuantizedWeight{.rows = 4, .group_size = 0}.groups(); },
               "expected a group size of 16, 32, 64, 128");
  expect_error([] { QuantizedWeight{.rows = 4, .bits = 1, .group_size = 16}.groups(); },
               "expected a group size of 32, 64, 128 or kWholeColumn, got 16");
  expect_error([] { QuantizedWeight{.rows = -4}.groups(); }, "expected rows >= 0, got -4");
}

TEST(QuantizedMatmul, Errors) {
  const QuantizedWeight good = random_weight({70, 6}).q;
  const Tensor x = ones({2, 70});
  const auto refuse = [&](auto change, const std::string& message) {
    QuantizedWeight q = good;
    change(q);
    expect_error([&] { quantized_matmul(x, q); }, "quantized_matmul: " + message);
    expect_error([&] { dequantize(q); }, "dequantize: " + message);
  };
  refuse([](auto& q) { q.bits = 3; }, "expected 8, 4, 2 or 1 bits, got 3");
  refuse([](auto& q) { q.group_size = 48; }, "expected a group size of 16, 32, 64, 128 or kWholeColumn, got 48");
  refuse([](auto& q) { q.packed = {}; }, "expected packed to be an int32 matrix, got an undefined tensor");
  refuse([](auto& q) { q.packed = zeros({9, 6}); }, "expected packed to be an int32 matrix, got float32 [9, 6]");
  refuse([](auto& q) { q.packed = zeros({54}, int32); }, "expected packed to be an int32 matrix, got int32 [54]");
  refuse(
      [](auto& q) {
        q.packed = zeros({8, 6}, int32);
      },
      "expected packed of shape [9, N] for 70 rows of 4 bits, got [8, 6]");
  refuse([](auto& q) { q.bits = 8; }, "expected packed of shape [18, N] for 70 rows of 8 bits, got [9, 6]");
  refuse([](auto& q) { q.rows = -1; }, "expected rows >= 0, got -1");
  refuse([](auto& q) { q.rows = INT64_MAX; }, "expected packed of shape [1152921504606846976, N]");
  refuse([](auto& q) { q.mode = static_cast<Mode>(77); }, "expected one of the 5 quantization modes, got 77");
  refuse([](auto& q) { q.scale = {}; }, "expected a scale in mode scale_and_shift");
  refuse([](auto& q) { q.scale = ones({6}); }, "expected scale of shape [2, 6], got [6]");
  refuse(
      [](auto& q) {
        q.scale = ones({2, 6}, int32);
      },
      "expected scale of a floating dtype or uint8 on cpu, got int32 on cpu");
  refuse(
      [](auto& q) {
        q.scale = ones({2, 6}, uint8);
      },
      "expected a floating scale_factor of shape [1, 6] on cpu for a scale of uint8, got an undefined tensor");
  refuse(
      [](auto& q) {
        q.zero = ones({2, 6}, uint8), q.zero_factor = ones({2, 6});
      },
      "expected a floating zero_factor of shape [1, 6] on cpu for a zero of uint8, got float32 [2, 6] on cpu");
  refuse([](auto& q) { q.scale_factor = ones({1, 6}); }, "expected no scale_factor unless scale is uint8");
  refuse([](auto& q) { q.zero = ones({}, uint8), q.zero_factor = ones({1, 6}); }, "expected zero of a floating dtype");
  refuse([](auto& q) { q.scale = ones({2, 6}).requires_grad_(); }, "expected a constant scale");
  refuse([](auto& q) { q.zero = {}; }, "expected a zero in mode scale_and_shift");
  refuse([](auto& q) { q.zero = ones({1, 6}); }, "expected zero of shape [2, 6] or [], got [1, 6]");
  refuse([](auto& q) { q.mode = Mode::shift; }, "expected no scale in mode shift");
  refuse([](auto& q) { q.mode = Mode::scale; }, "expected no zero in mode scale");
  refuse([](auto& q) { q.mode = Mode::packed; }, "expected no scale in mode packed");

  expect_error([&] { quantized_matmul({}, good); }, "expected x of a floating dtype, got an undefined tensor");
  expect_error([&] { quantized_matmul(ones({2, 70}, int32), good); }, "expected x of a floating dtype, got int32");
  expect_error([&] { quantized_matmul(ones({2, 71}), good); }, "expected x of shape (…, 70), got [2, 71]");
  expect_error([&] { quantized_matmul(ones({}), good); }, "expected x of shape (…, 70), got []");
  expect_error([&] { quantized_matmul(x, good, {.columns = ones({2})}); },
               "expected channels.columns of shape [6], got [2]");
  expect_error([&] { quantized_matmul(x, good, {.rows = ones({6})}); }, "expected channels.rows of shape [2], got [6]");
  expect_error([&] { quantized_matmul(x, good, {.rows = ones({2}, int64)}); },
               "expected channels.rows of a floating dtype on cpu, got int64 on cpu");
  expect_error([&] { quantized_matmul(x, good, {.rows = ones({2}).requires_grad_()}); },
               "expected a constant channels.rows, got one that requires a gradient");
  expect_error([&] { dequantize(good, int32); }, "dequantize: expected a floating dtype, got int32");

  // While nothing is recorded, scales that require a gradient are accepted.
  const autograd::NoGrad guard;
  quantized_matmul(x, good, {.rows = ones({2}).requires_grad_()});
}

}  // namespace quantized_test

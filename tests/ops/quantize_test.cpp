#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "norm_grid.h"
#include "tests/ops/quantized_formats.h"
#include "tests/support.h"
#include <mica/core/rng.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/quantized/quantize_two_levels.h>
#include <mica/ops/quantized/quantized.h>

using namespace mica;
using namespace mica::testing_support;

namespace quantize_test {

using Mode = QuantizationMode;
using Doubles = std::vector<double>;

TEST(PackBits, FirstRowIsLowest) {
  const Tensor values = from_data<std::int64_t>({1, 15, 2, 0, 3, 7, 4, 0, 5, 0, 6, 0, 7, 0, 8, 0, 9, 1}, {9, 2});
  const Tensor packed = pack_bits(values, 4);
  EXPECT_EQ(packed.dtype(), int32);
  EXPECT_EQ(packed.shape(), (Shape{2, 2}));
  const std::vector<std::int32_t> words = to_vector<std::int32_t>(packed);
  EXPECT_EQ(words[0], static_cast<std::int32_t>(0x87654321));
  EXPECT_EQ(words[1], 0x70f);
  EXPECT_EQ(words[2], 9);
  EXPECT_EQ(words[3], 1);
}

TEST(PackBits, RoundTrip) {
  manual_seed(8);
  for (const int bits : kBits) {
    for (const std::int64_t rows : {0, 1, 31, 32, 33, 100}) {
      const Tensor values = randint(0, 1 << bits, {rows, 5}, uint8);
      expect_same_bits(unpack_bits(pack_bits(values, bits), bits, rows), values);
      expect_same_bits(pack_bits(values.to(int64), bits), pack_bits(values, bits));
    }
  }
}

TEST(PackBits, Errors) {
  const Tensor values = full({3, 2}, 4, int64);
  expect_error([&] { pack_bits(values, 2); }, "pack_bits: expected values from 0 to 3, got 4");
  expect_error([&] { pack_bits(full({3, 2}, -1, int32), 8); }, "pack_bits: expected values from 0 to 255, got -1");
  expect_error([&] { pack_bits(values, 5); }, "pack_bits: expected 8, 4, 2 or 1 bits, got 5");
  expect_error([&] { pack_bits(ones({3, 2}), 4); }, "pack_bits: dtype float32 is not supported");
  expect_error([&] { pack_bits(values, 4), pack_bits(ones({3}, int32), 4); }, "pack_bits: expected values of shape");
  expect_error([&] { pack_bits({}, 4); }, "values of shape (K, N) on the cpu, got an undefined tensor");
  expect_error([&] { pack_bits(ones({3}, int32), 4); }, "on the cpu, got int32 [3] on cpu");
  expect_error([&] { unpack_bits({}, 4, 3); }, "expected an int32 matrix on the cpu, got an undefined tensor");
  const Tensor packed = pack_bits(values, 4);
  expect_error([&] { unpack_bits(packed, 4, -1); }, "unpack_bits: expected rows >= 0, got -1");
  expect_error([&] { unpack_bits(packed, 4, INT64_MIN); }, "expected rows >= 0, got -9223372036854775808");
  expect_error([&] { unpack_bits(packed, 4, INT64_MAX); },
               "expected a matrix of shape [1152921504606846976, N] for 9223372036854775807 rows of 4 bits");
  expect_error([&] { unpack_bits(values, 4, 3); }, "unpack_bits: expected an int32 matrix");
  expect_error([&] { unpack_bits(pack_bits(values, 4), 4, 9); },
               "unpack_bits: expected a matrix of shape [2, N] for 9 rows of 4 bits, got [1, 2]");
}

// For each weight, the scale of its group.
Doubles scales_of(const QuantizedWeight& q) {
  const Doubles scale = to_vector<double>(q.scale);
  const std::int64_t size = q.group_size == kWholeColumn ? q.rows : q.group_size;
  Doubles result;
  for (std::int64_t k = 0; k < q.rows; ++k) {
    for (std::int64_t n = 0; n < q.columns(); ++n) {
      result.push_back(scale[k / size * q.columns() + n]);
    }
  }
  return result;
}

std::vector<QuantizeOptions> all_options() {
  std::vector<QuantizeOptions> result;
  for (const int bits : kBits) {
    for (const std::int64_t group_size : kGroupSizes) {
      for (const DType dtype : {float32, float16, bfloat16}) {
        for (const auto& [scheme, mode] : std::vector<std::pair<QuantizationScheme, Mode>>{
                 {QuantizationScheme::asymmetric, Mode::scale_and_shift},
                 {QuantizationScheme::asymmetric, Mode::fused_multiply_add},
                 {QuantizationScheme::fitted, Mode::scale_and_shift},
                 {QuantizationScheme::symmetric, Mode::scale_and_shift}}) {
          result.push_back({.bits = bits, .group_size = group_size, .scheme = scheme, .mode = mode, .dtype = dtype});
        }
      }
    }
  }
  return result;
}

std::string text_of(const QuantizeOptions& o) {
  return fmt::format("{} bits, groups of {}, scheme {}, mode {}, {}", o.bits, o.group_size, static_cast<int>(o.scheme),
                     static_cast<int>(o.mode), o.dtype);
}

TEST(Quantize, IsOffByAtMostHalfAScale) {
  manual_seed(9);
  const std::vector<Tensor> weights = {randn({150, 21}, float64), rand({65, 70}, float64) + 3,
                                       rand({33, 3}, float64) * -2 - 0.5, randn({40, 5}, float64) * 1e-3};
  for (const QuantizeOptions& options : all_options()) {
    for (const Tensor& weight : weights) {
      for (const DType dtype : {float32, float64, float16, bfloat16}) {
        const Tensor given = weight.to(dtype);
        const QuantizedWeight q = quantize(given, options);
        ASSERT_EQ(q.scale.dtype(), options.dtype);
        ASSERT_EQ(q.zero.dtype(), options.dtype);
        const Doubles expected = to_vector<double>(given);
        const Doubles got = to_vector<double>(dequantize(q, float64));
        const Doubles scales = scales_of(q);
        for (std::size_t i = 0; i < expected.size(); ++i) {
          ASSERT_LE(std::abs(got[i] - expected[i]), scales[i] * (0.5 + 1e-9))
              << text_of(options) << ": weight " << i << " is " << expected[i] << ", became " << got[i];
        }
      }
    }
  }
}

TEST(Quantize, ScalesAreNoLargerThanTheRangeNeeds) {
  manual_seed(10);
  for (const QuantizeOptions& options : all_options()) {
    const Tensor weight = randn({32, 9}, float64);
    QuantizeOptions one_group = options;
    one_group.group_size = kWholeColumn;
    const QuantizedWeight q = quantize(weight, one_group);
    const Doubles values = to_vector<double>(weight);
    const Doubles scale = to_vector<double>(q.scale);
    for (int n = 0; n < 9; ++n) {
      double least = INFINITY, greatest = -INFINITY;
      for (int k = 0; k < 32; ++k) {
        least = std::min(least, values[k * 9 + n]);
        greatest = std::max(greatest, values[k * 9 + n]);
      }
      const int most = (1 << options.bits) - 1;
      double exact = (greatest - least) / most;
      if (options.scheme == QuantizationScheme::symmetric) {
        const double above = options.bits == 1 ? 0.5 : (1 << (options.bits - 1)) - 1;
        exact = std::max(greatest, -least) / above;
      }
      EXPECT_GE(scale[n], exact * (1 - 1e-12)) << text_of(options);
      EXPECT_LE(scale[n], exact * (1 + 4 * epsilon_of(options.dtype))) << text_of(options);
    }
  }
}

TEST(Quantize, KnownValues) {
  const Tensor weight = from_data<double>({-1.0, 0.0, 0.5, 2.0}, {4, 1});
  const QuantizedWeight asymmetric = quantize(weight, {.bits = 2, .scheme = QuantizationScheme::asymmetric});
  expect_close(asymmetric.scale, {1}, 0, 0);
  expect_close(asymmetric.zero, {1}, 0, 0);
  expect_close(unpack_bits(asymmetric.packed, 2, 4), {0, 1, 2, 3}, 0, 0);  // 0.5 is a tie and goes to the even integer
  expect_close(dequantize(asymmetric), {-1, 0, 1, 2}, 0, 0);

  const QuantizedWeight symmetric = quantize(weight, {.bits = 2, .scheme = QuantizationScheme::symmetric});
  EXPECT_EQ(symmetric.zero.shape(), Shape{});
  expect_close(symmetric.zero, {2}, 0, 0);
  expect_close(symmetric.scale, {2}, 0, 0);
  expect_close(unpack_bits(symmetric.packed, 2, 4), {2, 2, 2, 3}, 0, 0);  // -1 is a tie

  const QuantizedWeight signs = quantize(weight, {.bits = 1, .scheme = QuantizationScheme::symmetric});
  expect_close(signs.zero, {0.5}, 0, 0);
  expect_close(signs.scale, {4}, 0, 0);
  expect_close(dequantize(signs), {-2, -2, 2, 2}, 0, 0);  // 0 is a tie

  const QuantizedWeight line =
      quantize(weight, {.bits = 1, .scheme = QuantizationScheme::asymmetric, .mode = Mode::fused_multiply_add});
  expect_close(line.scale, {3}, 0, 0);
  expect_close(line.zero, {-1}, 0, 0);
  expect_close(dequantize(line), {-1, -1, -1, 2}, 0, 0);
}

TEST(Quantize, GroupsOfOneValueAreExact) {
  for (const QuantizeOptions& options : all_options()) {
    expect_close(dequantize(quantize(zeros({70, 3}), options)), Doubles(210, 0), 0, 0, text_of(options));
    if (options.scheme == QuantizationScheme::asymmetric) {
      expect_close(dequantize(quantize(full({70, 3}, 0.75), options)), Doubles(210, 0.75),
                   options.mode == Mode::scale_and_shift ? epsilon_of(options.dtype) : 0, 0, text_of(options));
    }
  }
}

double relative_error(const QuantizedWeight& q, const Tensor& weight) {
  const Doubles got = to_vector<double>(dequantize(q, float64)), expected = to_vector<double>(weight);
  double error = 0, size = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    error += (got[i] - expected[i]) * (got[i] - expected[i]);
    size += expected[i] * expected[i];
  }
  return std::sqrt(error / size);
}

// A zero that is not rounded uses all integers.
TEST(Quantize, FittedZerosHaveSmallerErrors) {
  manual_seed(12);
  const Tensor weight = randn({256, 40});
  for (const int bits : kBits) {
    for (const DType dtype : {float32, bfloat16}) {
      QuantizeOptions options{.bits = bits, .dtype = dtype};
      const double fitted = relative_error(quantize(weight, options), weight);
      options.scheme = QuantizationScheme::asymmetric;
      const double rounded = relative_error(quantize(weight, options), weight);
      EXPECT_TRUE(bits == 1 || bits == 8 ? fitted == rounded : fitted < rounded)
          << bits << " bits: " << fitted << ", " << rounded;
    }
  }
}

TEST(Quantize, TwoLevels) {
  manual_seed(13);
  const std::vector<Tensor> weights = {randn({600, 70}, float64), rand({65, 3}, float64) + 3,
                                       rand({256, 5}, float64) * -2e-3, randn({1, 1}, float64), zeros({300, 2})};
  for (const Tensor& weight : weights) {
    for (const int bits : {4, 2}) {
      for (const std::int64_t group_size : {16, 32, 64, 128}) {
        const QuantizedWeight q = quantize_two_levels(weight, {.bits = bits, .group_size = group_size});
        check_weight("test", q);
        EXPECT_EQ(q.scale.dtype(), uint8);
        EXPECT_EQ(q.scale_factor.dtype(), bfloat16);
        const Doubles expected = to_vector<double>(weight), got = to_vector<double>(dequantize(q, float64));
        const Doubles levels = to_vector<double>(q.scale), factors = to_vector<double>(q.scale_factor);
        for (std::size_t i = 0; i < expected.size(); ++i) {
          const auto columns = static_cast<std::size_t>(q.columns());
          const std::size_t row = i / columns, column = i % columns;
          const double scale = (levels[row / static_cast<std::size_t>(group_size) * columns + column] - 128) *
                               factors[row / 256 * columns + column];
          ASSERT_LE(std::abs(got[i] - expected[i]), scale * (0.5 + ((1 << bits) - 1) / 253.0))
              << bits << " bits, groups of " << group_size << ", weight " << i << ": " << expected[i] << ", " << got[i];
        }
      }
    }
  }
  const Tensor weight = randn({512, 40});
  const auto error = [&](const QuantizedWeight& q) { return relative_error(q, weight); };
  EXPECT_LT(error(quantize_two_levels(weight)), 0.88 * error(quantize(weight, {.dtype = float16})));
  EXPECT_LT(error(quantize_two_levels(weight, {.group_size = 64})), 1.03 * error(quantize(weight, {.dtype = float16})));
  expect_error([&] { quantize_two_levels(weight, {.bits = 8}); }, "quantize_two_levels: expected 4 or 2 bits, got 8");
  expect_error([&] { quantize_two_levels(weight, {.group_size = kWholeColumn}); }, "got whole columns");
  expect_error([&] { quantize_two_levels(weight, {.group_size = 48}); }, "expected a group size of");
  expect_error([&] { quantize_two_levels(zeros({3})); }, "expected a floating weight of shape (K, N)");
  expect_error([&] { quantize_two_levels(full({40, 2}, INFINITY)); }, "expected finite weights");
  expect_error([&] { quantize_two_levels(full({40, 2}, NAN)); }, "expected finite weights");
}

TEST(Quantize, AnyLayoutAndNoGradient) {
  manual_seed(11);
  const Tensor weight = randn({80, 12}).requires_grad_();
  const QuantizedWeight q = quantize(weight);
  EXPECT_FALSE(q.scale.requires_grad());
  EXPECT_FALSE(dequantize(q).requires_grad());
  for (const Tensor& same : {with_gaps(weight.detach()), off_by_one(weight.detach())}) {
    const QuantizedWeight other = quantize(same);
    expect_same_bits(other.packed, q.packed);
    expect_same_bits(other.scale, q.scale);
    expect_same_bits(other.zero, q.zero);
  }
  for (const Device device : test_devices()) {
    const QuantizedWeight there = quantize(weight.to(device));
    EXPECT_EQ(there.packed.device(), device);
    EXPECT_EQ(there.zero.device(), device);
    expect_same_bits(there.packed, q.packed);
    expect_same_bits(dequantize(there), dequantize(q));
  }
}

TEST(Quantize, Errors) {
  const Tensor weight = ones({40, 3});
  expect_error([&] { quantize(weight, {.bits = 16}); }, "quantize: expected 8, 4, 2 or 1 bits, got 16");
  expect_error([&] { quantize(weight, {.group_size = 24}); }, "quantize: expected a group size of");
  expect_error([&] { quantize(weight, {.mode = static_cast<Mode>(77)}); },
               "quantize: expected one of the 5 quantization modes, got 77");
  expect_error([&] { quantize(weight, {.scheme = static_cast<QuantizationScheme>(9)}); },
               "quantize: expected the scheme asymmetric, symmetric or fitted, got 9");
  expect_error([&] { quantize(weight, {.mode = Mode::shift}); },
               "quantize: expected the mode scale_and_shift or fused_multiply_add");
  expect_error([&] { quantize(weight, {.scheme = QuantizationScheme::symmetric, .mode = Mode::fused_multiply_add}); },
               "quantize: expected the mode scale_and_shift for the symmetric scheme");
  expect_error([&] { quantize(weight, {.dtype = float64}); }, "expected scales of float32, float16 or bfloat16");
  expect_error([&] { quantize({}); }, "expected a floating weight of shape (K, N), got an undefined tensor");
  expect_error([&] { quantize(ones({40})); }, "expected a floating weight of shape (K, N), got float32 [40]");
  expect_error([&] { quantize(ones({4, 3}, int32)); }, "got int32 [4, 3]");
  for (const double bad : {double{INFINITY}, double{-INFINITY}, std::nan("")}) {
    Tensor spoiled = zeros({40, 3});
    spoiled.data<float>()[61] = static_cast<float>(bad);
    expect_error([&] { quantize(spoiled); }, "expected finite weights");
  }
  expect_error([&] { quantize(weight * 1e9, {.dtype = float16}); }, "whose scales and zeros fit float16");
}

}  // namespace quantize_test

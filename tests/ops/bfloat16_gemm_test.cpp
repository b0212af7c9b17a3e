#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <tuple>
#include <vector>

#include "tests/support.h"
#include <mica/core/creation.h>
#include <mica/core/parallel.h>
#include <mica/core/rng.h>
#include <mica/ops/gemm/detail/bfloat16_gemm.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;
using gemm::Bfloat16Unit;

namespace bfloat16_gemm_test {

/// Runs a test with one of the CPU's instruction sets for bfloat16.
class OnEachUnit : public ::testing::TestWithParam<Bfloat16Unit> {
 protected:
  void SetUp() override {
    gemm::limit_bfloat16_unit(GetParam());
    if (gemm::bfloat16_unit() != GetParam()) {
      GTEST_SKIP() << "this CPU does not have it";
    }
  }
  void TearDown() override { gemm::limit_bfloat16_unit(Bfloat16Unit::amx); }
};

/// A matrix of small integers, whose products and sums are exact, in a given layout.
struct Operand {
  std::vector<BFloat16> data;
  gemm::Matrix<BFloat16> matrix;

  Operand(std::int64_t rows, std::int64_t columns, bool transposed, std::int64_t gap, std::mt19937& random)
      : data((rows + gap) * (columns + gap) + 1) {
    for (BFloat16& x : data) {
      x = BFloat16(static_cast<float>(static_cast<int>(random() % 9) - 4));
    }
    // Begins at the second element, so that nothing is aligned by chance.
    matrix = {data.data() + 1, transposed ? 1 : columns + gap, transposed ? rows + gap : 1};
  }
  double at(std::int64_t i, std::int64_t j) const { return matrix.data[i * matrix.row + j * matrix.column]; }
};

struct Sizes {
  std::int64_t m, n, depth;
};

const std::vector<Sizes> kSizes{{1, 1, 1},      {16, 16, 32},  {32, 32, 64},  {48, 80, 96},
                                {17, 15, 33},   {33, 65, 31},  {16, 48, 130}, {64, 32, 160},
                                {100, 70, 257}, {7, 129, 512}, {33, 1030, 40}};

// A matrix of integers of up to `bits` bits, row by row with a gap.
std::vector<float> integers(std::int64_t rows, std::int64_t leading, int bits, std::mt19937& random) {
  std::vector<float> values(rows * leading);
  for (float& x : values) {
    x = static_cast<float>(static_cast<int>(random() % (2U << bits)) - (1 << bits));
  }
  return values;
}

TEST(SplitProduct, KeepsSixteenBits) {
  if (gemm::bfloat16_unit() != Bfloat16Unit::amx) {
    GTEST_SKIP() << "this CPU has no AMX";
  }
  std::mt19937 random(2);
  for (const auto& [m, n, depth] : kSizes) {
    // Products of 12 and 4 bits are exact. Numbers of 23 bits are rounded, and the product of the low parts is left
    // out.
    for (const auto& [a_bits, b_bits, error] :
         {std::tuple{11, 3, 0.0}, std::tuple{3, 11, 0.0}, std::tuple{22, 22, 0x1p-15}}) {
      const std::int64_t a_row = depth + 3, b_column = depth + 1;
      const std::vector<float> a = integers(m, a_row, a_bits, random), b = integers(n, b_column, b_bits, random);
      const std::vector<float> start = integers(1, n, 6, random);
      std::vector<float> sums(m * n);
      ASSERT_TRUE(gemm::has_split_product({a.data(), a_row, 1}, {b.data(), 1, b_column}));
      gemm::multiply_split(m, n, depth, {a.data(), a_row, 1}, {b.data(), 1, b_column}, start.data(), sums.data());
      for (std::int64_t i = 0; i < m; ++i) {
        for (std::int64_t j = 0; j < n; ++j) {
          double sum = start[j], size = 0;
          for (std::int64_t k = 0; k < depth; ++k) {
            const double product = static_cast<double>(a[i * a_row + k]) * b[j * b_column + k];
            sum += product;
            size += std::abs(product);
          }
          ASSERT_NEAR(sums[i * n + j], sum, error * size)
              << fmt::format("{}x{}x{}, {} and {} bits, at {}, {}", m, n, depth, a_bits, b_bits, i, j);
        }
      }
    }
  }
  EXPECT_FALSE(gemm::has_split_product({nullptr, 1, 4}, {nullptr, 1, 4}));
  EXPECT_FALSE(gemm::has_split_product({nullptr, 4, 1}, {nullptr, 4, 1}));
}

// Elsewhere, and in products of other layouts, the setting changes nothing.
TEST(SplitProduct, IsUsedByLinearLayersIfAskedFor) {
  struct Restore {
    ~Restore() { set_float32_matmul_precision(MatmulPrecision::float32); }
  } restore;
  manual_seed(4);
  const Tensor x = randn({40, 96}), weight = randn({48, 96}), bias = randn({48});
  const Tensor exact = linear(x, weight, bias), product = matmul(x, view(weight, {96, 48}));
  set_float32_matmul_precision(MatmulPrecision::bfloat16x2);
  const Tensor rounded = linear(x, weight, bias);
  const bool has_amx = gemm::bfloat16_unit() == Bfloat16Unit::amx;
  EXPECT_EQ(to_vector<float>(exact) != to_vector<float>(rounded), has_amx);
  expect_close(rounded, exact, 0, 3e-4);
  EXPECT_EQ(to_vector<float>(matmul(x, view(weight, {96, 48}))), to_vector<float>(product));
}

TEST_P(OnEachUnit, MultipliesEveryLayoutExactly) {
  std::mt19937 random(1);
  for (const auto& [m, n, depth] : kSizes) {
    for (const int layout : {0, 1, 2, 3}) {
      for (const std::int64_t gap : {0, 3, 32}) {
        const Operand a(m, depth, (layout & 1) != 0, gap, random), b(depth, n, (layout & 2) != 0, gap, random);
        std::vector<float> start(n);
        std::generate(start.begin(), start.end(), [&] { return static_cast<float>(random() % 100); });
        std::vector<float> sums(m * n, -1);
        std::vector<BFloat16> rounded(m * n);
        gemm::multiply_bfloat16(m, n, depth, a.matrix, b.matrix, start.data(), sums.data());
        gemm::multiply_bfloat16(m, n, depth, a.matrix, b.matrix, start.data(), rounded.data());
        std::vector<float> twice = sums;
        gemm::add_product_bfloat16(m, n, depth, a.matrix, b.matrix, twice.data());
        for (std::int64_t i = 0; i < m; ++i) {
          for (std::int64_t j = 0; j < n; ++j) {
            double product = 0;
            for (std::int64_t k = 0; k < depth; ++k) {
              product += a.at(i, k) * b.at(k, j);
            }
            const auto sum = static_cast<float>(start[j] + product);
            const std::string where =
                fmt::format("{}x{}x{}, layout {}, gap {}, at {}, {}", m, n, depth, layout, gap, i, j);
            ASSERT_EQ(sums[i * n + j], sum) << where;
            ASSERT_EQ(rounded[i * n + j].bits, BFloat16(sum).bits) << where;
            ASSERT_EQ(twice[i * n + j], static_cast<float>(sum + product)) << where;
          }
        }
      }
    }
  }
}

// More elements than are packed at a time, in each direction.
TEST_P(OnEachUnit, MultipliesLongAndWideMatrices) {
  std::mt19937 random(2);
  const std::int64_t depth = 70000;  // 2 panels of 32 x 70000 are more than 2²²
  const Operand a(65, depth, true, 0, random), b(depth, 65, false, 0, random);
  const std::vector<float> start(65, 0);
  std::vector<float> sums(65 * 65);
  gemm::multiply_bfloat16(65, 65, depth, a.matrix, b.matrix, start.data(), sums.data());
  for (const std::int64_t i : {0, 31, 32, 63, 64}) {
    for (const std::int64_t j : {0, 31, 32, 63, 64}) {
      double product = 0;
      for (std::int64_t k = 0; k < depth; ++k) {
        product += a.at(i, k) * b.at(k, j);
      }
      EXPECT_EQ(sums[i * 65 + j], product) << i << ", " << j;
    }
  }
}

TEST_P(OnEachUnit, KeepsInfinityAndNan) {
  for (const float special : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    Tensor a = full({40, 70}, 1, DType::bfloat16);
    a.data<BFloat16>()[3 * 70 + 69] = BFloat16(special);
    const std::vector<double> y = to_vector<double>(matmul(a, full({70, 20}, 1, DType::bfloat16)));
    for (int i = 0; i < 40 * 20; ++i) {
      if (i / 20 == 3) {
        EXPECT_FALSE(std::isfinite(y[i])) << i;
      } else {
        EXPECT_EQ(y[i], 70) << i;
      }
    }
  }
}

TEST_P(OnEachUnit, ThreadsDoNotChangeTheBits) {
  const int threads = num_threads();
  const Tensor a = randn({200, 300}, DType::bfloat16);
  for (const std::int64_t columns : {150, 1100}) {
    const Tensor b = randn({300, columns}, DType::bfloat16);
    set_num_threads(1);
    const std::vector<double> one = to_vector<double>(matmul(a, b));
    for (const int several : {3, 7}) {  // for 7 threads, 1100 columns are too few to be divided into groups
      set_num_threads(several);
      EXPECT_EQ(to_vector<double>(matmul(a, b)), one) << columns << " columns, " << several << " threads";
    }
  }
  set_num_threads(threads);
}

INSTANTIATE_TEST_SUITE_P(Bfloat16Gemm, OnEachUnit, ::testing::Values(Bfloat16Unit::avx512, Bfloat16Unit::amx),
                         [](const auto& info) { return info.param == Bfloat16Unit::amx ? "Amx" : "Avx512"; });

}  // namespace bfloat16_gemm_test

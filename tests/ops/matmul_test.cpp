#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "tests/ops/matrix_layouts.h"
#include "tests/support.h"
#include <mica/autograd/gradcheck.h>
#include <mica/core/copy.h>
#include <mica/core/parallel.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/gemm/detail/few_rows.h>
#include <mica/ops/inplace/inplace.h>
#include <mica/ops/matmul/detail/agreement.h>
#include <mica/ops/matmul/detail/layout.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace matmul_test {

// The tolerance of an element, relative to the sum of its terms' magnitudes.
double tolerance(DType dtype) {
  switch (dtype) {
    case DType::float64: return 1e-14;
    case DType::float32: return 2e-6;
    case DType::float16: return 1.0 / 1024;
    default: return 1.0 / 128;
  }
}

struct Reference {
  std::vector<double> values, magnitudes;
};

// (B, M, K) · (B, K, N) by the definition. An operand with B = 1 is broadcast.
Reference reference(const Tensor& a, const Tensor& b) {
  const std::int64_t batch = std::max(a.size(0), b.size(0));
  const std::int64_t m = a.size(1), n = b.size(2), depth = a.size(2);
  const std::vector<double> x = to_vector<double>(a);
  const std::vector<double> w = to_vector<double>(b);
  Reference result{std::vector<double>(batch * m * n), std::vector<double>(batch * m * n)};
  for (std::int64_t item = 0; item < batch; ++item) {
    const double* const xs = x.data() + (a.size(0) == 1 ? 0 : item * m * depth);
    const double* const ws = w.data() + (b.size(0) == 1 ? 0 : item * depth * n);
    for (std::int64_t i = 0; i < m; ++i) {
      for (std::int64_t j = 0; j < n; ++j) {
        for (std::int64_t k = 0; k < depth; ++k) {
          const double term = xs[i * depth + k] * ws[k * n + j];
          result.values[(item * m + i) * n + j] += term;
          result.magnitudes[(item * m + i) * n + j] += std::abs(term);
        }
      }
    }
  }
  return result;
}

void expect_product(const Tensor& y, const Tensor& a, const Tensor& b, const std::string& what) {
  const Reference expected = reference(a, b);
  const std::vector<double> got = to_vector<double>(y);
  ASSERT_EQ(got.size(), expected.values.size()) << what;
  for (std::size_t i = 0; i < got.size(); ++i) {
    // The result is rounded once, and its terms are summed in float32.
    const double allowed = tolerance(y.dtype()) * std::abs(expected.values[i]) +
                           (y.dtype() == float64 ? 1e-14 : 2e-6) * expected.magnitudes[i] + 1e-30;
    ASSERT_LE(std::abs(got[i] - expected.values[i]), allowed) << what << ": element " << i << " is " << got[i];
  }
}

std::string describe(DType dtype, Device device, const Shape& a, const Shape& b) {
  return to_string(a) + " · " + to_string(b) + " " + std::string(name_of(dtype)) + " on " + to_string(device);
}

const std::vector<DType> kDTypes{float64, float32, float16, bfloat16};

TEST(Matmul, MatchesDefinition) {
  const std::vector<std::array<std::int64_t, 3>> sizes{{1, 1, 1},   {1, 5, 3},    {7, 1, 4},     {5, 3, 1},
                                                       {8, 32, 16}, {9, 33, 17},  {17, 31, 513}, {64, 65, 40},
                                                       {3, 16, 70}, {13, 48, 32}, {1, 100, 64},  {100, 1, 64}};
  for (const Device device : test_devices()) {
    for (const DType dtype : kDTypes) {
      for (const auto& size : sizes) {
        const Tensor a = randn({1, size[0], size[2]}, dtype, device);
        const Tensor b = randn({1, size[2], size[1]}, dtype, device);
        const std::string what = describe(dtype, device, a.shape(), b.shape());
        const Tensor x = select(a, 0, 0), w = select(b, 0, 0);
        expect_product(matmul(x, w), a, b, what);
        expect_product(matmul(stored_transposed(x), w), a, b, what + ", a transposed");
        expect_product(matmul(x, stored_transposed(w)), a, b, what + ", b transposed");
        expect_product(matmul(stored_transposed(x), stored_transposed(w)), a, b, what + ", both transposed");
        expect_product(matmul(padded(x), padded(w)), a, b, what + ", unaligned with gaps");
      }
    }
  }
}

TEST(Matmul, LongSums) {
  for (const Device device : test_devices()) {
    for (const DType dtype : kDTypes) {
      for (const std::int64_t depth : {2048, 2049, 5001}) {
        const Tensor a = randn({1, 9, depth}, dtype, device);
        const Tensor b = randn({1, depth, 35}, dtype, device);
        expect_product(matmul(a, b), a, b, describe(dtype, device, a.shape(), b.shape()));
        expect_product(matmul(stored_transposed(a), stored_transposed(b)), a, b,
                       describe(dtype, device, a.shape(), b.shape()) + ", both transposed");
      }
    }
  }
}

// Sums that are so long that float32 would lose digits of the last terms.
TEST(Matmul, VeryLongSums) {
  constexpr std::int64_t kDepth = 1'000'003;
  const double total = 0.1f * static_cast<double>(kDepth);
  for (const std::int64_t rows : {1, 8, 9}) {
    const Tensor a = full({rows, kDepth}, 0.1);
    const std::vector<double> expected(static_cast<std::size_t>(3 * rows), total);
    expect_close(matmul(a, ones({kDepth, 3})), expected, 2e-5, 0);
    expect_close(matmul(a, transpose(ones({3, kDepth}), 0, 1)), expected, 2e-5, 0);
  }
  expect_close(linear(full({1, kDepth}, 0.1), ones({2, kDepth}), from_data({1.0f, 2.0f})), {total + 1, total + 2}, 2e-5,
               0);
}

TEST(Matmul, FewRowsOfLargeMatrices) {
  const int before = num_threads();
  for (const DType dtype : kDTypes) {
    for (const std::int64_t rows : {1, 2, 5, 8, 9}) {
      for (const auto& [depth, columns] : {std::pair<std::int64_t, std::int64_t>{70, 301}, {1029, 67}}) {
        const Tensor a = randn({1, rows, depth}, dtype), b = randn({1, depth, columns}, dtype);
        const Tensor x = select(a, 0, 0), w = select(b, 0, 0), bias = randn({columns}, dtype);
        const std::string what = describe(dtype, Device::cpu(), a.shape(), b.shape());
        for (const Tensor& stored : {w, stored_transposed(w), padded(w)}) {
          set_num_threads(1);
          const Tensor one = matmul(x, stored);
          set_num_threads(3);
          EXPECT_TRUE(same_bits(matmul(x, stored), one)) << what;
          expect_product(one, a, b, what);
          EXPECT_TRUE(same_bits(matmul(stored_transposed(x), stored), one)) << what << ", a transposed";
          // The bias is added before the result is rounded.
          const DType wide = dtype == float64 ? float64 : float32;
          const Tensor sums = matmul(x.to(wide), stored.to(wide)) + bias.to(wide);
          const std::vector<double> expected = to_vector<double>(sums);
          const std::vector<double> got = to_vector<double>(linear(x, transpose(stored, 0, 1), bias));
          for (std::size_t i = 0; i < got.size(); ++i) {
            ASSERT_NEAR(got[i], expected[i], tolerance(dtype) * std::abs(expected[i]) + 1e-3) << what << ", bias";
          }
        }
      }
    }
  }
  set_num_threads(before);
}

TEST(Matmul, LargerThanAPackedBlock) {
  // Compares whole rows and whole columns from both ends, since the definition takes long for all of them.
  const auto expect_ends = [](const Tensor& y, const Tensor& a, const Tensor& b, const char* what) {
    const std::int64_t rows = a.size(1), columns = b.size(2);
    for (const std::int64_t row : {std::int64_t{0}, rows / 2, rows - 2}) {
      expect_product(slice(y, 1, row, row + 2), slice(a, 1, row, row + 2), b, what);
    }
    for (const std::int64_t column : {std::int64_t{0}, columns - 2}) {
      expect_product(slice(y, 2, column, column + 2), a, slice(b, 2, column, column + 2), what);
    }
  };
  const Tensor a = randn({1, 150, 2048}), b = randn({1, 2048, 545});
  expect_ends(matmul(a, b), a, b, "b in two blocks");
  const Tensor c = randn({1, 530, 2048}), d = randn({1, 2048, 40});
  expect_ends(matmul(stored_transposed(c), d), c, d, "a in two blocks");
}

TEST(Matmul, SixteenBitSumsAreRoundedOnce) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float16, bfloat16}) {
      // In 16 bits, each later term would be lost when it is added to the first.
      const Tensor a = ones({1, 2049}, dtype, device);
      const Tensor b = full({2049, 1}, 1.0 / 2048, dtype, device);
      fill_data(slice(b, 0, 0, 1), 8);
      EXPECT_EQ(matmul(a, b).item(), 9) << name_of(dtype);
    }
  }
}

TEST(Matmul, Batched) {
  for (const Device device : test_devices()) {
    for (const DType dtype : kDTypes) {
      const Tensor a = randn({6, 10, 7}, dtype, device);
      const Tensor b = randn({6, 7, 9}, dtype, device);
      const std::string what = describe(dtype, device, a.shape(), b.shape());
      expect_product(matmul(a, b), a, b, what);
      expect_product(matmul(stored_transposed(a), stored_transposed(b)), a, b, what + ", transposed");
      const Tensor nested = matmul(reshape(a, {2, 3, 10, 7}), reshape(b, {2, 3, 7, 9}));
      EXPECT_EQ(nested.shape(), (Shape{2, 3, 10, 9}));
      expect_product(nested, a, b, what + ", two leading axes");
      // A layout as of attention's heads: (B, T, H, D) in memory, viewed as (B, H, T, D).
      const Tensor heads = transpose(contiguous(transpose(reshape(a, {2, 3, 10, 7}), 1, 2)), 1, 2);
      expect_product(matmul(heads, reshape(b, {2, 3, 7, 9})), a, b, what + ", heads");
    }
  }
}

TEST(Matmul, BroadcastsLeadingAxes) {
  for (const Device device : test_devices()) {
    const Tensor a = randn({4, 5, 3}, float64, device);
    const Tensor b = randn({1, 3, 6}, float64, device);
    expect_product(matmul(a, b), a, b, "b of one");
    expect_product(matmul(a, select(b, 0, 0)), a, b, "b without leading axes");
    const Tensor c = randn({4, 3, 6}, float64, device);
    const Tensor one = slice(a, 0, 0, 1);
    expect_product(matmul(one, c), one, c, "a of one");
    expect_product(matmul(select(one, 0, 0), c), one, c, "a without leading axes");
    // Both operands are broadcast: (2, 1, M, K) · (3, K, N).
    const Tensor left = randn({2, 1, 4, 5}, float64, device);
    const Tensor right = randn({3, 5, 2}, float64, device);
    const Tensor y = matmul(left, right);
    ASSERT_EQ(y.shape(), (Shape{2, 3, 4, 2}));
    for (std::int64_t i = 0; i < 2; ++i) {
      expect_product(select(y, 0, i), select(left, 0, i), right, "both stretch");
    }
  }
}

TEST(Matmul, Vectors) {
  for (const Device device : test_devices()) {
    const Tensor v = randn({5}, float64, device), w = randn({5}, float64, device);
    const Tensor m = randn({5, 3}, float64, device), batch = randn({2, 4, 5}, float64, device);
    const Tensor dot = matmul(v, w);
    EXPECT_EQ(dot.shape(), Shape{});
    expect_product(dot, reshape(v, {1, 1, 5}), reshape(w, {1, 5, 1}), "vector · vector");
    const Tensor row = matmul(v, m);
    EXPECT_EQ(row.shape(), Shape{3});
    expect_product(row, reshape(v, {1, 1, 5}), reshape(m, {1, 5, 3}), "vector · matrix");
    const Tensor column = matmul(transpose(m, 0, 1), v);
    EXPECT_EQ(column.shape(), Shape{3});
    expect_product(column, reshape(transpose(m, 0, 1), {1, 3, 5}), reshape(v, {1, 5, 1}), "matrix · vector");
    const Tensor columns = matmul(batch, v);
    EXPECT_EQ(columns.shape(), (Shape{2, 4}));
    expect_product(columns, batch, reshape(v, {1, 5, 1}), "batch · vector");
    const Tensor rows = matmul(v, transpose(batch, 1, 2));
    EXPECT_EQ(rows.shape(), (Shape{2, 4}));
    expect_product(rows, reshape(v, {1, 1, 5}), transpose(batch, 1, 2), "vector · batch");
  }
}

TEST(Matmul, Empty) {
  for (const Device device : test_devices()) {
    const Tensor zero = matmul(empty({2, 0}, float32, device), empty({0, 3}, float32, device));
    expect_close(zero, std::vector<double>(6, 0.0), 0, 0);
    EXPECT_EQ(matmul(empty({0, 4}, float32, device), empty({4, 3}, float32, device)).shape(), (Shape{0, 3}));
    EXPECT_EQ(matmul(empty({5, 4}, float32, device), empty({4, 0}, float32, device)).shape(), (Shape{5, 0}));
    EXPECT_EQ(matmul(empty({0, 5, 4}, float32, device), empty({4, 3}, float32, device)).shape(), (Shape{0, 5, 3}));
    EXPECT_EQ(matmul(empty({0}, float32, device), empty({0}, float32, device)).item(), 0);

    const Tensor a = empty({2, 0}, float32, device).requires_grad_();
    const Tensor b = empty({0, 3}, float32, device).requires_grad_();
    matmul(a, b).backward(ones({2, 3}, float32, device));
    EXPECT_EQ(a.grad().shape(), a.shape());
    EXPECT_EQ(b.grad().shape(), b.shape());

    const Tensor none = empty({0, 4}, float32, device).requires_grad_();
    const Tensor w = ones({4, 3}, float32, device).requires_grad_();
    matmul(none, w).backward(empty({0, 3}, float32, device));
    expect_close(w.grad(), std::vector<double>(12, 0.0), 0, 0);
  }
}

TEST(Matmul, Gradients) {
  const std::vector<std::pair<Shape, Shape>> cases{{{4}, {4}},
                                                   {{4}, {4, 3}},
                                                   {{3, 4}, {4}},
                                                   {{3, 4}, {4, 2}},
                                                   {{1, 1}, {1, 1}},
                                                   {{2, 3, 4}, {4}},
                                                   {{2, 3, 4}, {4, 5}},
                                                   {{3, 4}, {2, 4, 5}},
                                                   {{4}, {2, 4, 3}},
                                                   {{2, 3, 4}, {2, 4, 5}},
                                                   {{2, 3, 4}, {1, 4, 5}},
                                                   {{1, 3, 4}, {2, 4, 5}},
                                                   {{2, 1, 3, 4}, {3, 4, 2}},
                                                   {{2, 2, 3, 4}, {4, 2}},
                                                   {{2, 2, 3, 4}, {2, 2, 4, 3}}};
  for (const Device device : test_devices()) {
    for (const auto& sizes : cases) {
      SCOPED_TRACE(describe(float64, device, sizes.first, sizes.second));
      EXPECT_TRUE(
          autograd::gradcheck(matmul, {randn(sizes.first, float64, device), randn(sizes.second, float64, device)}));
    }
  }
}

TEST(Matmul, GradientsOfOneOperand) {
  const Tensor a = randn({3, 4}), b = randn({4, 5});
  a.requires_grad_();
  const Tensor y = matmul(a, b);
  fill_(a.detach(), 0);  // only b's gradient depends on a, so that a was not saved
  y.backward(ones({3, 5}));
  expect_product(a.grad(), ones({1, 3, 5}), unsqueeze(transpose(b, 0, 1), 0), "da");
  EXPECT_FALSE(b.grad().defined());
}

TEST(Matmul, SecondDerivatives) {
  for (const Device device : test_devices()) {
    const Tensor a = randn({2, 3, 4}, float64, device), b = randn({4, 5}, float64, device);
    EXPECT_TRUE(autograd::gradgradcheck(matmul, {a, b}));
    EXPECT_TRUE(autograd::gradgradcheck([&](const Tensor& x) { return matmul(x, b); }, {a}));
  }
}

// On CUDA, TF32 rounds each factor to 10 mantissa bits, but only if it is selected.
TEST(Matmul, Tf32OnlyIfAskedFor) {
  struct Restore {
    ~Restore() { set_float32_matmul_precision(MatmulPrecision::float32); }
  } restore;
  EXPECT_EQ(float32_matmul_precision(), MatmulPrecision::float32);
  for (const Device device : test_devices()) {
    const double step = 1.0 / 4096;
    const Tensor a = full({256, 256}, 1 + step, float32, device), b = ones({256, 256}, float32, device);
    const auto results = [&] {
      const Tensor batch = reshape(a, {4, 64, 256});
      return std::vector<double>{matmul(a, b).to(Device::cpu()).data<float>()[0],
                                 matmul(batch, expand(b, {4, 256, 256})).to(Device::cpu()).data<float>()[0],
                                 linear(a, b).to(Device::cpu()).data<float>()[0],
                                 linear(a, b, zeros({256}, float32, device)).to(Device::cpu()).data<float>()[0]};
    };
    const std::vector<double> exact(4, 256 * (1 + step));
    EXPECT_EQ(results(), exact);
    set_float32_matmul_precision(MatmulPrecision::tf32);
    EXPECT_EQ(float32_matmul_precision(), MatmulPrecision::tf32);
    EXPECT_EQ(results(), device.is_cuda() ? std::vector<double>(4, 256) : exact);
    const Tensor wide = ones({4, 4}, float64, device) * (1 + step);
    EXPECT_EQ(matmul(wide, wide).to(Device::cpu()).data<double>()[0], 4 * (1 + step) * (1 + step));
    set_float32_matmul_precision(MatmulPrecision::float32);
    EXPECT_EQ(results(), exact);
  }
}

TEST(Matmul, TransposedViewsAreNotCopied) {
  const Tensor x = randn({3, 5, 7});
  EXPECT_TRUE(kernels::readable(x).is_same(x));
  const Tensor turned = transpose(x, 1, 2);
  EXPECT_TRUE(kernels::readable(turned).is_same(turned));
  EXPECT_TRUE(kernels::matrix_layout(turned).transposed);
  EXPECT_EQ(kernels::matrix_layout(turned).leading, 7);
  const Tensor gaps = slice(x, 2, 1, 4);
  EXPECT_TRUE(kernels::readable(gaps).is_same(gaps));
  EXPECT_EQ(kernels::matrix_layout(gaps).leading, 7);
  const Tensor heads = transpose(randn({2, 6, 3, 4}), 1, 2);
  EXPECT_TRUE(kernels::readable(heads).is_same(heads));
  EXPECT_EQ(kernels::matrix_layout(heads).leading, 12);
  // Neither rows nor columns are contiguous.
  const Tensor scattered = slice(x, 2, 0, 7, 2);
  EXPECT_FALSE(kernels::matrix_layout(scattered).readable);
  expect_product(matmul(scattered, ones({4, 2})), contiguous(scattered), ones({1, 4, 2}), "scattered");
  // One row, broadcast to several.
  const Tensor stretched = expand(randn({1, 4}), {3, 4});
  expect_product(matmul(stretched, ones({4, 2})), reshape(stretched, {1, 3, 4}), ones({1, 4, 2}), "stretched");
}

TEST(Matmul, ThreadsDoNotChangeBits) {
  const int before = num_threads();
  const std::vector<std::pair<Shape, Shape>> cases{
      {{70, 300}, {300, 130}}, {{5, 2100}, {2100, 1100}}, {{3, 40, 33}, {3, 33, 65}}, {{48, 20, 8}, {48, 8, 20}}};
  for (const DType dtype : kDTypes) {
    for (const auto& sizes : cases) {
      const Tensor a = randn(sizes.first, dtype), b = randn(sizes.second, dtype);
      set_num_threads(1);
      const Tensor one = matmul(a, b);
      for (const int threads : {2, 3, 7}) {
        set_num_threads(threads);
        EXPECT_TRUE(same_bits(matmul(a, b), one)) << name_of(dtype) << " " << a.shape()[0] << ", " << threads;
      }
    }
  }
  set_num_threads(before);
}

TEST(Matmul, RowsDoNotDependOnEachOther) {
  for (const DType dtype : kDTypes) {
    const Tensor a = randn({45, 600}, dtype), b = randn({600, 70}, dtype);
    const Tensor all = matmul(a, b);
    EXPECT_TRUE(same_bits(matmul(slice(a, 0, 20, 40), b), slice(all, 0, 20, 40)));
    // Few rows have their own kernels, one for each layout of b.
    for (const Tensor& w : {b, stored_transposed(b)}) {
      const Tensor few = matmul(slice(a, 0, 0, gemm::kFewRows), w);
      for (const std::int64_t rows : {1, 2, 3, 5, 7}) {
        EXPECT_TRUE(same_bits(matmul(slice(a, 0, 0, rows), w), slice(few, 0, 0, rows)))
            << name_of(dtype) << ", " << rows << " rows, strides " << w.strides()[0] << ", " << w.strides()[1];
      }
      for (const std::int64_t column : {0, 31, 64, 69}) {
        EXPECT_TRUE(same_bits(matmul(slice(a, 0, 0, 3), slice(w, 1, column, column + 1)),
                              slice(slice(few, 0, 0, 3), 1, column, column + 1)))
            << column;
      }
    }
    for (const std::int64_t column : {0, 31, 32, 69}) {
      EXPECT_TRUE(same_bits(matmul(a, slice(b, 1, column, column + 1)), slice(all, 1, column, column + 1))) << column;
    }
    EXPECT_TRUE(same_bits(matmul(stored_transposed(a), stored_transposed(b)), all));
  }
}

TEST(Matmul, RunsAreIdentical) {
  for (const Device device : test_devices()) {
    for (const DType dtype : kDTypes) {
      const Tensor a = randn({4, 65, 300}, dtype, device), b = randn({4, 300, 33}, dtype, device);
      EXPECT_TRUE(same_bits(matmul(a, b), matmul(a, b)));
      const Tensor x = randn({33, 5000}, dtype, device), w = randn({5000, 17}, dtype, device);
      EXPECT_TRUE(same_bits(matmul(x, w), matmul(x, w)));
    }
  }
}

TEST(Matmul, NaNAndInfinityStayInTheirRow) {
  for (const Device device : test_devices()) {
    const Tensor a = ones({3, 4}, float32, device);
    fill_data(slice(select(a, 0, 0), 0, 1, 2), NAN);
    fill_data(slice(select(a, 0, 2), 0, 1, 2), INFINITY);
    expect_close(matmul(a, ones({4, 2}, float32, device)), {NAN, NAN, 4, 4, INFINITY, INFINITY}, 0, 0);
  }
}

TEST(Matmul, Errors) {
  const Tensor a = ones({2, 3});
  expect_error([&] { matmul(a, ones({4, 5})); }, "matmul: expected inner sizes that are equal, got [2, 3] and [4, 5]");
  expect_error([&] { matmul(a, ones({2})); }, "matmul: expected inner sizes that are equal");
  expect_error([] { set_float32_matmul_precision(static_cast<MatmulPrecision>(3)); },
               "expected one of the enumerators of MatmulPrecision, got 3");
  expect_error([&] { matmul(ones({}), a); }, "matmul: expected tensors with at least one axis, got [] and [2, 3]");
  expect_error([&] { matmul(ones({2, 4, 3}), ones({3, 3, 4})); }, "matmul:");
  expect_error(
      [&] {
        matmul(a, ones({3, 2}, float64));
      },
      "matmul: expected one numeric dtype, got float32 and float64");
  expect_error([&] { matmul(ones({2, 3}, boolean), ones({3, 2}, boolean)); }, "matmul: expected one numeric dtype");
  if (cuda_available()) {
    expect_error([&] { matmul(a, ones({3, 2}, float32, Device::cuda())); }, "matmul: expected one device, got cpu and");
  }
}

// Sets MatmulTuning::timed until the end of the scope.
struct Timed {
  Timed() { set_matmul_tuning(MatmulTuning::timed); }
  ~Timed() { set_matmul_tuning(MatmulTuning::heuristic); }
};

TEST(MatmulTuning, TimedProductsAreRightAndRepeat) {
  if (!cuda_available()) {
    GTEST_SKIP() << "no GPU";
  }
  const Device device = Device::cuda();
  for (const DType dtype : {bfloat16, float16}) {
    const Tensor x = randn({512, 256}, dtype, device), weight = randn({384, 256}, dtype, device);
    const Tensor bias = randn({384}, dtype, device);
    for (const Activation f : {Activation::none, Activation::gelu_tanh}) {
      const Tensor expected = linear(x, weight, bias, f);
      const Timed guard;
      const Tensor first = linear(x, weight, bias, f), again = linear(x, weight, bias, f);
      const double bound = dtype == bfloat16 ? 2e-2 : 3e-3;
      expect_close(first, expected, bound, bound);
      expect_close(again, first, 0, 0);
    }
    const Tensor plain = matmul(x, transpose(weight, 0, 1));
    const Timed guard;
    expect_close(matmul(x, transpose(weight, 0, 1)), plain, 2e-2, 2e-2);
  }
  const std::string text = matmul_algorithms(device);
  EXPECT_GE(std::count(text.begin(), text.end(), '\n'), 7);
  set_matmul_algorithms(text, device);
  EXPECT_EQ(matmul_algorithms(device), text);
  expect_error([&] { set_matmul_algorithms("other" + text, device); }, "expected text that begins with \"cuBLASLt");
  expect_error([&] { set_matmul_algorithms(text + "1 2 3\n", device); }, "malformed line: \"1 2 3\"");
  expect_error([&] { set_matmul_algorithms(text.substr(0, text.rfind(' ')), device); }, "malformed line");
  EXPECT_EQ(matmul_algorithms(device), text);
}

TEST(MatmulTuning, AnAlgorithmAgreesUpToRounding) {
  const auto agree = [](const std::vector<float>& expected, const std::vector<float>& got) {
    return detail::agree_up_to_rounding(expected, got, 1e-2);
  };
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr float kInf = std::numeric_limits<float>::infinity();
  // The norm of the expected result is 5, so that differences of up to 0.05 are accepted.
  EXPECT_TRUE(agree({3, -4}, {3, -4}));
  EXPECT_TRUE(agree({3, -4}, {3.03F, -4.03F}));
  EXPECT_FALSE(agree({3, -4}, {3.04F, -4.04F}));
  EXPECT_FALSE(agree({3, -4}, {3, 4}));
  EXPECT_FALSE(agree({3, -4}, {0, 0}));
  EXPECT_TRUE(agree({0, 0}, {0, 0}));
  EXPECT_FALSE(agree({0, 0}, {0, 1e-6F}));
  // NaN and infinities must be at the same positions, and do not hide other differences.
  EXPECT_FALSE(agree({3, -4}, {3, kNan}));
  EXPECT_FALSE(agree({3, kNan}, {3, -4}));
  EXPECT_FALSE(agree({3, -4}, {3, -kInf}));
  EXPECT_FALSE(agree({3, kInf}, {3, -kInf}));
  EXPECT_FALSE(agree({3, kInf}, {3, kNan}));
  EXPECT_FALSE(agree({kNan, 3}, {3, kNan}));
  EXPECT_TRUE(agree({kNan, kInf, -kInf, 3, -4}, {kNan, kInf, -kInf, 3, -4.01F}));
  EXPECT_FALSE(agree({kNan, kInf, -kInf, 3, -4}, {kNan, kInf, -kInf, 3, -5}));
}

TEST(MatmulTuning, DoesNothingOnTheCpu) {
  const Timed guard;
  EXPECT_EQ(matmul_tuning(), MatmulTuning::timed);
  const Tensor a = randn({9, 5}), b = randn({5, 4});
  const Tensor y = matmul(a, b);
  set_matmul_tuning(MatmulTuning::heuristic);
  expect_close(matmul(a, b), y, 0, 0);
  EXPECT_EQ(matmul_algorithms(Device::cpu()), "");
  set_matmul_algorithms("", Device::cpu());
  expect_error([] { set_matmul_algorithms("x", Device::cpu()); }, "expected a GPU");
}

}  // namespace matmul_test

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/support.h"
#include <mica/autograd/gradcheck.h>
#include <mica/core/rng.h>
#include <mica/ops/dropout/dropout.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace dropout_test {

/// Expects that a fraction p of y's elements is 0, within five standard deviations.
void expect_share_of_zeros(const Tensor& y, double p) {
  const std::vector<double> values = to_vector<double>(y);
  const double n = static_cast<double>(values.size());
  const double zeros = static_cast<double>(std::count(values.begin(), values.end(), 0.0));
  EXPECT_NEAR(zeros / n, p, 5 * std::sqrt(p * (1 - p) / n));
}

TEST(Dropout, KeepsTheExpectedShareAndScalesIt) {
  for (const Device device : test_devices()) {
    for (const double p : {0.1, 0.5, 0.9}) {
      manual_seed(7);
      const std::int64_t n = 200'003;
      const double scale = 1 / (1 - std::round(p * 65536) / 65536);
      const std::vector<double> y = to_vector<double>(dropout(ones({n}, float64, device), p));
      double kept = 0;
      double together = 0;  // pairs of neighbors that are both kept
      for (std::int64_t i = 0; i < n; ++i) {
        ASSERT_TRUE(y[i] == 0 || y[i] == scale) << y[i];
        kept += y[i] != 0;
        together += i > 0 && y[i] != 0 && y[i - 1] != 0;
      }
      const double deviation = std::sqrt(p * (1 - p) / static_cast<double>(n));
      EXPECT_NEAR(kept / static_cast<double>(n), 1 - p, 5 * deviation);
      EXPECT_NEAR(together / static_cast<double>(n), (1 - p) * (1 - p), 10 * deviation);
    }
  }
}

// Eight elements share the bits of a Philox block. Each must be dropped with probability p, independently of the
// others.
TEST(Dropout, ElementsOfAGroupAreIndependent) {
  for (const Device device : test_devices()) {
    for (const double p : {0.25, 0.6}) {
      manual_seed(14);
      const std::int64_t groups = 20'000;
      const std::vector<double> y = to_vector<double>(dropout(ones({groups * 8}, float32, device), p));
      double kept[8][8] = {};  // the number of groups in which elements i and j are both kept
      for (std::int64_t group = 0; group < groups; ++group) {
        for (int i = 0; i < 8; ++i) {
          for (int j = 0; j < 8; ++j) {
            kept[i][j] += y[group * 8 + i] != 0 && y[group * 8 + j] != 0;
          }
        }
      }
      for (int i = 0; i < 8; ++i) {
        for (int j = 0; j < 8; ++j) {
          const double expected = i == j ? 1 - p : (1 - p) * (1 - p);
          const double deviation = std::sqrt(expected * (1 - expected) / static_cast<double>(groups));
          EXPECT_NEAR(kept[i][j] / static_cast<double>(groups), expected, 5 * deviation) << i << ", " << j;
        }
      }
    }
  }
}

// A probability below 2⁻¹⁶ is rounded up to 2⁻¹⁶; one close to 1 still keeps some elements.
TEST(Dropout, SmallestAndLargestProbability) {
  for (const Device device : test_devices()) {
    manual_seed(15);
    const std::int64_t n = 2'000'000;
    const auto share_of_zeros = [&](double p, double scale) {
      double zeros = 0;
      for (const double y : to_vector<double>(dropout(ones({n}, float64, device), p))) {
        EXPECT_TRUE(y == 0 || y == scale) << y;
        zeros += y == 0;
      }
      return zeros / static_cast<double>(n);
    };
    EXPECT_NEAR(share_of_zeros(1e-12, 65536 / 65535.0), 0x1p-16, 1.5e-5);
    EXPECT_NEAR(1 - share_of_zeros(1 - 1e-12, 65536), 0x1p-16, 1.5e-5);
  }
}

TEST(Dropout, OneMaskForAllDtypesLayoutsAndDevices) {
  const auto run = [](const Tensor& x) {
    manual_seed(8);
    return to_vector<double>(dropout(x, 0.5));
  };
  const std::vector<double> expected = run(ones({7, 37}, float64));
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, float16, bfloat16}) {
      EXPECT_EQ(run(ones({7, 37}, dtype, device)), expected);
      EXPECT_EQ(run(transpose(ones({37, 7}, dtype, device), 0, 1)), expected);
      EXPECT_EQ(run(reshape(slice(ones({7 * 37 + 1}, dtype, device), 0, 1, 7 * 37 + 1), {7, 37})), expected);
    }
    EXPECT_EQ(dropout(empty({0, 3}, float32, device), 0.5).numel(), 0);
  }
}

TEST(Dropout, ReproducibleBySeedAndDifferentFromCallToCall) {
  const Tensor x = ones({1000});
  manual_seed(9);
  const std::vector<double> first = to_vector<double>(dropout(x, 0.5));
  const std::vector<double> second = to_vector<double>(dropout(x, 0.5));
  manual_seed(9);
  EXPECT_EQ(to_vector<double>(dropout(x, 0.5)), first);
  EXPECT_NE(first, second);
  manual_seed(10);
  EXPECT_NE(to_vector<double>(dropout(x, 0.5)), first);
}

TEST(Dropout, GradientUsesTheSameMask) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, float16, bfloat16}) {
      manual_seed(12);
      const Tensor x = ones({5, 130}, dtype, device).requires_grad_();
      const Tensor y = dropout(x, 0.4);
      y.backward(ones_like(y));
      EXPECT_EQ(to_vector<double>(x.grad()), to_vector<double>(y));
      expect_share_of_zeros(y, 0.4);
    }
    EXPECT_TRUE(autograd::gradcheck([](const Tensor& a) { return dropout(a, 0.3); }, {randn({4, 6}, float64, device)}));
  }
}

TEST(Dropout, ZeroesNonFiniteValues) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, float16, bfloat16}) {
      for (const double special : {static_cast<double>(INFINITY), static_cast<double>(NAN)}) {
        manual_seed(13);
        const Tensor x = full({1000}, special, dtype, device).requires_grad_();
        const Tensor y = dropout(x, 0.5);
        for (const double value : to_vector<double>(y)) {
          ASSERT_TRUE(value == 0 || !std::isfinite(value));
        }
        expect_share_of_zeros(y, 0.5);
        // dx is 0 where y is 0, even if dy is NaN or infinite.
        y.backward(full({1000}, special, dtype, device));
        const std::vector<double> g = to_vector<double>(x.grad());
        const std::vector<double> values = to_vector<double>(y);
        for (std::size_t i = 0; i < g.size(); ++i) {
          ASSERT_EQ(g[i] == 0, values[i] == 0) << i;
        }
      }
    }
  }
}

TEST(Dropout, IdentityOutsideOfTrainingAndDrawsNothing) {
  manual_seed(11);
  const Tensor x = randn({3});
  const PhiloxKey before = rng_state();
  EXPECT_TRUE(dropout(x, 0.5, false).is_same(x));
  EXPECT_TRUE(dropout(x, 0).is_same(x));
  EXPECT_EQ(rng_state().offset, before.offset);
}

TEST(Dropout, Errors) {
  expect_error([] { dropout(ones({2}), 1); }, "dropout: expected p in [0, 1), got 1");
  expect_error([] { dropout(ones({2}), -0.1); }, "dropout: expected p in [0, 1), got -0.1");
  expect_error([] { dropout(ones({2}), NAN); }, "dropout: expected p in [0, 1)");
  expect_error([] { dropout(ones({2}, int64), 0.5); }, "dropout: expected a floating dtype, got int64");
}

// For any number of elements, also if the last packet is incomplete: each is kept and scaled, or 0.
TEST(Dropout, EachElementOfAnyNumber) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, float16}) {
      for (std::int64_t n = 1; n <= 20; ++n) {
        for (const double y : to_vector<double>(dropout(ones({n}, dtype, device), 0.5))) {
          EXPECT_TRUE(y == 0 || y == 2) << y << " among " << n;
        }
      }
    }
  }
}

}  // namespace dropout_test

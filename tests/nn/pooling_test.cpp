#include <tests/nn/support.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <span>

#include <mica/autograd/gradcheck.h>
#include <mica/core/rng.h>
#include <mica/nn/pooling.h>
#include <mica/ops/elementwise/compare.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

using nn::Pooling;

constexpr std::int64_t kBatch = 4, kLength = 5, kWidth = 3;
// Padding at the end, within the text and at its beginning, and a row without a text.
constexpr std::array<std::int64_t, kBatch * kLength> kVisible{1, 1, 1, 0, 0, 1, 0, 1, 1, 0,
                                                              0, 0, 1, 1, 1, 0, 0, 0, 0, 0};

double pooled_value(const std::vector<double>& x, std::int64_t row, std::int64_t column, Pooling pooling) {
  double total = 0, weights = 0, largest = -INFINITY, last = 0;
  for (std::int64_t t = 0; t < kLength; ++t) {
    const double value = x[(row * kLength + t) * kWidth + column];
    if (kVisible[row * kLength + t] != 0) {
      const double weight = pooling == Pooling::weighted_mean ? static_cast<double>(t) + 1 : 1;
      total += weight * value;
      weights += weight;
      largest = std::max(largest, value);
      last = value;
    }
  }
  switch (pooling) {
    case Pooling::max: return largest;
    case Pooling::first: return x[row * kLength * kWidth + column];
    case Pooling::last: return last;
    case Pooling::mean_sqrt_length: return total / std::sqrt(std::max(weights, 1.0));
    case Pooling::mean:
    case Pooling::weighted_mean: break;
  }
  return total / std::max(weights, 1.0);
}

constexpr std::array kPoolings{
    Pooling::mean, Pooling::mean_sqrt_length, Pooling::weighted_mean, Pooling::max, Pooling::first, Pooling::last};

TEST(PoolTokens, Values) {
  manual_seed(1);
  const Tensor features = randn({kBatch, kLength, kWidth}, float64);
  const std::vector<double> x = to_vector<double>(features);
  for (const Device device : test_devices()) {
    const Tensor visible = from_data(std::span<const std::int64_t>(kVisible), {kBatch, kLength}).to(device);
    for (const DType dtype : {float64, float32, bfloat16}) {
      const Tensor given = features.to(device).to(dtype);
      for (const Pooling pooling : kPoolings) {
        SCOPED_TRACE(fmt::format("{} {}", dtype, static_cast<int>(pooling)));
        const Tensor y = nn::pool_tokens(given, visible, pooling);
        ASSERT_EQ(y.shape(), (Shape{kBatch, kWidth}));
        EXPECT_EQ(y.dtype(), dtype);
        EXPECT_EQ(to_vector<double>(nn::pool_tokens(given, visible != 0, pooling)), to_vector<double>(y));
        const std::vector<double> values = to_vector<double>(y);
        for (std::int64_t i = 0; i < kBatch * kWidth; ++i) {
          const double expected = pooled_value(x, i / kWidth, i % kWidth, pooling);
          const double tolerance = dtype == float64 ? 1e-12 : dtype == float32 ? 1e-6 : 2e-2;
          EXPECT_TRUE(values[i] == expected || std::abs(values[i] - expected) <= tolerance)
              << values[i] << " and " << expected;
        }
        // Without padding, as with all tokens visible.
        expect_close(nn::pool_tokens(given, {}, pooling),
                     nn::pool_tokens(given, ones({kBatch, kLength}, int32, device), pooling), 0, 0);
      }
    }
  }
}

TEST(PoolTokens, SumsOf16BitsAreExact) {
  // In bfloat16, 256 + 1 = 256.
  EXPECT_EQ(nn::pool_tokens(ones({1, 4096, 1}, bfloat16)).item(), 1);
}

TEST(PoolTokens, Gradients) {
  manual_seed(2);
  const Tensor visible =
      from_data(std::span<const std::int64_t>(kVisible).first((kBatch - 1) * kLength), {kBatch - 1, kLength});
  for (const Pooling pooling : kPoolings) {
    EXPECT_TRUE(autograd::gradcheck([&](const Tensors& in) { return nn::pool_tokens(in[0], visible, pooling); },
                                    {randn({kBatch - 1, kLength, kWidth}, float64)}));
  }
}

TEST(PoolTokens, Errors) {
  const auto pool = [](const Tensor& features, const Tensor& visible) { return nn::pool_tokens(features, visible); };
  expect_error(
      [&] {
        pool(zeros({2, 3}), {});
      },
      "pool_tokens: expected features of shape (B, T, C), T >= 1, got [2, 3]");
  expect_error([&] { pool(zeros({2, 0, 3}), {}); }, "T >= 1, got [2, 0, 3]");
  expect_error([&] { pool(zeros({2, 3, 1}, int64), {}); }, "pool_tokens: expected floating features, got int64");
  expect_error(
      [&] {
        pool(zeros({2, 3, 1}), zeros({2, 2}, int64));
      },
      "pool_tokens: expected visible of shape [2, 3], got [2, 2]");
  expect_error([&] { pool(zeros({2, 3, 1}), ones({2, 3})); }, "pool_tokens: expected visible of bool or integers");
}

}  // namespace

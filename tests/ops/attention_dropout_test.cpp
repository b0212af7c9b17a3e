#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/launches.h"
#include "tests/rows_close.h"
#include "tests/support.h"
#include <mica/autograd/gradcheck.h>
#include <mica/core/copy.h>
#include <mica/core/rng.h>
#include <mica/ops/attention/attention.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace attention_dropout_test {

TEST(Attention, GradientsWithDropout) {
  for (const Device device : test_devices()) {
    EXPECT_TRUE(autograd::gradcheck(
        [&](const Tensor& q, const Tensor& k, const Tensor& v) {
          return scaled_dot_product_attention(q, k, v, {.causal = true, .dropout = 0.4});
        },
        {randn({2, 4, 3}, float64, device), randn({2, 4, 3}, float64, device), randn({2, 4, 2}, float64, device)}));
  }
}

TEST(Attention, DropoutScalesWhatItKeeps) {
  for (const Device device : test_devices()) {
    // With equal scores and values of 1, y is the fraction of weights that are kept, divided by 1 − p.
    const Tensor q = zeros({1, 64, 8}, float32, device), k = zeros({1, 256, 8}, float32, device);
    const Tensor v = ones({1, 256, 1}, float32, device);
    double sum = 0;
    bool dropped = false;
    for (const double y : to_vector<double>(scaled_dot_product_attention(q, k, v, {.dropout = 0.25}))) {
      sum += y / 64;
      dropped = dropped || std::abs(y - 1) > 1e-3;
    }
    EXPECT_TRUE(dropped);
    EXPECT_NEAR(sum, 1, 0.03);  // six standard deviations
  }
}

// Which weights are kept: 1 or, for dropped ones, 0; (items, queries, keys). Scores are equal, and values identify
// keys.
std::vector<double> kept_weights(std::int64_t items, std::int64_t queries, std::int64_t keys, double p, Device device) {
  const Tensor q = zeros({items, queries, 8}, float32, device), k = zeros({items, keys, 8}, float32, device);
  std::vector<float> identity(static_cast<std::size_t>(keys * keys));
  for (std::int64_t i = 0; i < keys; ++i) {
    identity[static_cast<std::size_t>(i * keys + i)] = 1;
  }
  const Tensor v = contiguous(broadcast_view(from_data(identity, {1, keys, keys}, device), {items, keys, keys}));
  std::vector<double> kept = to_vector<double>(scaled_dot_product_attention(q, k, v, {.dropout = p}));
  for (double& weight : kept) {
    weight = weight != 0;
  }
  return kept;
}

TEST(Attention, DropoutDropsTheExpectedShareOfWeights) {
  const std::int64_t items = 4, queries = 192, keys = 160;
  for (const Device device : test_devices()) {
    for (const double p : {0.001, 0.1, 0.2, 0.5, 0.9, 0.999}) {
      const double share = std::clamp(std::round(p * 256), 1.0, 255.0) / 256;  // the fraction that is dropped
      const std::vector<double> kept = kept_weights(items, queries, keys, p, device);
      const double n = static_cast<double>(kept.size());
      double sum = 0;
      for (const double weight : kept) {
        sum += weight;
      }
      EXPECT_NEAR(sum / n, 1 - share, 5 * std::sqrt(share * (1 - share) / n)) << fmt::format("{} on {}", p, device);
      // Each weight is independent of its neighbors, and of those drawn together with it.
      for (const auto& [down, right] : std::vector<std::pair<std::int64_t, std::int64_t>>{{0, 1},
                                                                                          {1, 0},
                                                                                          {1, 1},
                                                                                          {0, 8},
                                                                                          {8, 0},
                                                                                          {8, 8},
                                                                                          {0, 16},
                                                                                          {16, 0},
                                                                                          {0, 32},
                                                                                          {32, 0},
                                                                                          {0, 64},
                                                                                          {64, 0},
                                                                                          {queries, 0}}) {
        double covariance = 0, pairs = 0;
        for (std::int64_t row = 0; row + down < items * queries; ++row) {
          for (std::int64_t key = 0; key + right < keys; ++key) {
            const double one = kept[static_cast<std::size_t>(row * keys + key)] - (1 - share);
            const double other = kept[static_cast<std::size_t>((row + down) * keys + key + right)] - (1 - share);
            covariance += one * other;
            ++pairs;
          }
        }
        EXPECT_LT(std::abs(covariance / pairs), 5 * share * (1 - share) / std::sqrt(pairs))
            << p << ", " << down << " down and " << right << " to the right";
      }
    }
  }
}

// Which weights are dropped depends only on their positions and the random key, not on T, S or the device.
TEST(Attention, DropoutDependsOnThePositionOnly) {
  for (const Device device : test_devices()) {
    manual_seed(31);
    const std::vector<double> large = kept_weights(1, 100, 90, 0.4, Device::cpu());
    manual_seed(31);
    const std::vector<double> small = kept_weights(1, 37, 50, 0.4, device);
    for (std::int64_t i = 0; i < 37; ++i) {
      for (std::int64_t j = 0; j < 50; ++j) {
        ASSERT_EQ(small[static_cast<std::size_t>(i * 50 + j)], large[static_cast<std::size_t>(i * 90 + j)])
            << fmt::format("{}, {} on {}", i, j, device);
      }
    }
    const std::vector<double> next = kept_weights(1, 37, 50, 0.4, device);
    EXPECT_NE(next, small) << "the next call draws others";
  }
}

TEST(Attention, EveryBackendDropsTheSameWeights) {
  for (const Device device : test_devices()) {
    for (const AttentionBackend backend : {AttentionBackend::blocked, AttentionBackend::flash}) {
      if ((backend == AttentionBackend::blocked) != device.is_cpu()) {
        continue;
      }
      const DType dtype = device.is_cpu() ? float64 : bfloat16;
      for (const bool causal : {true, false}) {
        const Tensor q = randn({2, 4, 150, 64}, dtype, device), k = randn({2, 2, 301, 64}, dtype, device);
        const Tensor v = randn({2, 2, 301, 64}, dtype, device), dy = randn({2, 4, 150, 64}, dtype, device);
        const auto run = [&](AttentionBackend which) {
          manual_seed(77);
          const Tensor qs = q.detach().requires_grad_(), ks = k.detach().requires_grad_();
          const Tensor vs = v.detach().requires_grad_();
          const Tensor y = scaled_dot_product_attention(
              qs, ks, vs, {.causal = causal, .causal_offset = 100, .dropout = 0.3, .backend = which});
          y.backward(dy);
          return Tensors{y.detach(), qs.grad(), ks.grad(), vs.grad()};
        };
        cuda::LaunchRecord record;
        const Tensors got = run(backend);
        if (gpu_has_wgmma()) {
          expect_launched(record, device,
                          {"flash_forward_sm90_kernel", "flash_stats_kernel", "flash_query_gradient_sm90_kernel",
                           "flash_key_gradient_sm90_kernel"});
        }
        const Tensors wanted = run(AttentionBackend::composed), again = run(backend);
        for (std::size_t i = 0; i < got.size(); ++i) {
          const std::string what = fmt::format("result {} on {}, causal {}", i, device, causal);
          expect_rows_close(got[i], to_vector<double>(wanted[i]), 64, device.is_cpu() ? 1e-12 : 2e-2, what);
          expect_same_bits(again[i], got[i], what + ": the same again");
        }
      }
    }
  }
}

}  // namespace attention_dropout_test

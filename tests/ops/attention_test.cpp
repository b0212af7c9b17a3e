#include <gtest/gtest.h>

#include <cstring>

#include "tests/rows_close.h"
#include "tests/support.h"
#include <mica/autograd/gradcheck.h>
#include <mica/core/copy.h>
#include <mica/core/parallel.h>
#include <mica/core/rng.h>
#include <mica/ops/attention/attention.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

/// Values, and how large the terms are that each is the sum of: the root of their squares' sum, to which the errors of
/// terms that were rounded one by one are in proportion.
struct Sums {
  std::vector<double> values, scales;

  explicit Sums(std::size_t n) : values(n), scales(n) {}
  void add(std::size_t i, double term, double size) {
    values[i] += term;
    scales[i] = std::hypot(scales[i], size);
  }
};

// y and the gradients by their definitions, for (N, T, D), (N, S, D), (N, S, Dv).
struct Reference {
  Sums y, dq, dk, dv;
};

Reference reference(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& dy, bool causal, double scale) {
  const std::int64_t width = q.size(-1), queries = q.size(-2), keys = k.size(-2), values = v.size(-1);
  const std::int64_t items = q.numel() / (queries * width);
  const std::vector<double> qs = to_vector<double>(q), ks = to_vector<double>(k), vs = to_vector<double>(v);
  const std::vector<double> gs = to_vector<double>(dy);
  Reference r{Sums(gs.size()), Sums(qs.size()), Sums(ks.size()), Sums(vs.size())};
  for (std::int64_t n = 0; n < items; ++n) {
    for (std::int64_t i = 0; i < queries; ++i) {
      const double* const query = &qs[(n * queries + i) * width];
      const double* const g = &gs[(n * queries + i) * values];
      const std::int64_t seen = causal ? std::min(i + 1, keys) : keys;
      std::vector<double> p(seen), dp(seen);
      double most = -INFINITY, sum = 0, mean = 0, mean_size = 0;
      for (std::int64_t j = 0; j < seen; ++j) {
        for (std::int64_t d = 0; d < width; ++d) {
          p[j] += scale * query[d] * ks[(n * keys + j) * width + d];
        }
        most = std::max(most, p[j]);
      }
      for (double& x : p) {
        x = std::exp(x - most);
        sum += x;
      }
      for (std::int64_t j = 0; j < seen; ++j) {
        p[j] /= sum;
        for (std::int64_t d = 0; d < values; ++d) {
          const double value = vs[(n * keys + j) * values + d];
          r.y.add((n * queries + i) * values + d, p[j] * value, p[j] * value);
          r.dv.add((n * keys + j) * values + d, p[j] * g[d], p[j] * g[d]);
          dp[j] += g[d] * value;
        }
        mean += p[j] * dp[j];
        mean_size += p[j] * std::abs(dp[j]);
      }
      for (std::int64_t j = 0; j < seen; ++j) {
        const double dscore = scale * p[j] * (dp[j] - mean);
        const double size = scale * p[j] * (std::abs(dp[j]) + mean_size);
        for (std::int64_t d = 0; d < width; ++d) {
          const double key = ks[(n * keys + j) * width + d];
          r.dq.add((n * queries + i) * width + d, dscore * key, size * key);
          r.dk.add((n * keys + j) * width + d, dscore * query[d], size * query[d]);
        }
      }
    }
  }
  return r;
}

void expect_sums(const Tensor& got, const Sums& expected, double tolerance, const std::string& what) {
  expect_rows_close(got, expected.values, expected.scales, 1, tolerance, what);
}

struct Sizes {
  std::int64_t queries, keys, width, values;
};

TEST(Attention, MatchesDefinition) {
  // Rows of one, of less and of more than a packet or a warp, and each way in which a row is kept on CUDA.
  const std::vector<Sizes> sizes{{1, 1, 1, 1},   {1, 5, 3, 2},    {5, 5, 4, 4},   {7, 3, 4, 5},  {3, 9, 4, 6},
                                 {33, 33, 8, 8}, {70, 70, 8, 16}, {2, 300, 4, 4}, {300, 2, 4, 4}};
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, float16, bfloat16}) {
      const double tolerance = dtype == float64 ? 1e-12 : dtype == float32 ? 2e-5 : 4 * epsilon_of(dtype);
      for (const Sizes& s : sizes) {
        for (const bool causal : {false, true}) {
          const Tensor q = randn({2, 3, s.queries, s.width}, dtype, device).requires_grad_();
          const Tensor k = randn({2, 3, s.keys, s.width}, dtype, device).requires_grad_();
          const Tensor v = randn({2, 3, s.keys, s.values}, dtype, device).requires_grad_();
          const Tensor dy = randn({2, 3, s.queries, s.values}, dtype, device);
          const std::string what =
              fmt::format("{} on {}, T {}, S {}, causal {}", dtype, device, s.queries, s.keys, causal);
          const Tensor y = scaled_dot_product_attention(q, k, v, {.causal = causal});
          ASSERT_EQ(y.shape(), dy.shape());
          y.backward(dy);
          const double scale = 1 / std::sqrt(static_cast<double>(s.width));
          const Reference expected = reference(q, k, v, dy, causal, scale);
          expect_sums(y, expected.y, tolerance, what + " y");
          expect_sums(q.grad(), expected.dq, tolerance, what + " dq");
          expect_sums(k.grad(), expected.dk, tolerance, what + " dk");
          expect_sums(v.grad(), expected.dv, tolerance, what + " dv");
        }
      }
    }
  }
}

TEST(Attention, LongRows) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32}) {
      for (const std::int64_t keys : {1000, 1025, 4099}) {
        const Tensor q = randn({1, 3, 4}, dtype, device).requires_grad_();
        const Tensor k = randn({1, keys, 4}, dtype, device).requires_grad_();
        const Tensor v = randn({1, keys, 4}, dtype, device).requires_grad_();
        const Tensor dy = randn({1, 3, 4}, dtype, device);
        const Tensor y = scaled_dot_product_attention(q, k, v, {.scale = 1.5});
        y.backward(dy);
        const Reference expected = reference(q, k, v, dy, false, 1.5);
        const double tolerance = dtype == float64 ? 1e-12 : 2e-5;
        expect_sums(y, expected.y, tolerance, "y");
        expect_sums(q.grad(), expected.dq, tolerance, "dq");
        expect_sums(k.grad(), expected.dk, tolerance, "dk");
        expect_sums(v.grad(), expected.dv, tolerance, "dv");
      }
    }
  }
}

TEST(Attention, Gradients) {
  for (const Device device : test_devices()) {
    for (const Sizes& s : {Sizes{1, 1, 2, 2}, Sizes{4, 4, 3, 2}, Sizes{3, 5, 2, 3}, Sizes{5, 3, 2, 3}}) {
      const Tensors inputs{randn({2, 1, s.queries, s.width}, float64, device),
                           randn({2, 1, s.keys, s.width}, float64, device),
                           randn({2, 1, s.keys, s.values}, float64, device)};
      for (const bool causal : {false, true}) {
        const AttentionOptions options{.causal = causal, .scale = causal ? std::optional<double>{} : -0.7};
        EXPECT_TRUE(autograd::gradcheck([&](const Tensor& q, const Tensor& k,
                                            const Tensor& v) { return scaled_dot_product_attention(q, k, v, options); },
                                        inputs));
      }
    }
  }
}

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
    // Equal scores over values of 1: y is the share of weights that stayed, over 1 − p.
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

TEST(Attention, CausalRowsDoNotSeeWhatComesAfter) {
  for (const Device device : test_devices()) {
    const Tensor q = randn({1, 2, 6, 4}, float32, device), k = randn({1, 2, 6, 4}, float32, device);
    const Tensor v = randn({1, 2, 6, 3}, float32, device);
    const Tensor y = scaled_dot_product_attention(q, k, v, {.causal = true});
    expect_close(select(y, 2, 0), select(v, 2, 0), 1e-6, 1e-6, "the first query sees the first key only");
    const Tensor changed = contiguous(k), other = contiguous(v);
    const Tensor new_k = randn_like(changed), new_v = randn_like(other);
    copy_into(slice(new_k, 2, 0, 4), slice(k, 2, 0, 4));
    copy_into(slice(new_v, 2, 0, 4), slice(v, 2, 0, 4));
    const Tensor again = scaled_dot_product_attention(q, new_k, new_v, {.causal = true});
    expect_close(slice(again, 2, 0, 4), slice(y, 2, 0, 4), 0, 0);
  }
}

TEST(Attention, LargeScoresDoNotOverflow) {
  for (const Device device : test_devices()) {
    const Tensor q = full({1, 2, 1}, 300, float32, device);
    const Tensor k = from_data<float>({300, -300, 299}, {1, 3, 1}, device);
    const Tensor v = from_data<float>({1, 2, 3}, {1, 3, 1}, device);
    expect_close(scaled_dot_product_attention(q, k, v), {1, 1}, 1e-6, 0);
  }
}

TEST(Attention, NaNStaysInItsRow) {
  for (const Device device : test_devices()) {
    const Tensor q = ones({1, 3, 2}, float32, device);
    fill_data(slice(q, 1, 1, 2), NAN);
    const Tensor k = zeros({1, 3, 2}, float32, device), v = ones({1, 3, 1}, float32, device);
    expect_close(scaled_dot_product_attention(q, k, v), {1, NAN, 1}, 1e-6, 0);
  }
}

TEST(Attention, HeadsByTranspose) {
  for (const Device device : test_devices()) {
    const Tensor x = randn({2, 5, 3, 4}, float32, device);  // (B, T, H, D)
    const Tensor q = transpose(x, 1, 2);
    expect_close(scaled_dot_product_attention(q, q, q, {.causal = true}),
                 scaled_dot_product_attention(contiguous(q), contiguous(q), contiguous(q), {.causal = true}), 1e-5,
                 1e-6);
  }
}

TEST(Attention, Empty) {
  for (const Device device : test_devices()) {
    const Tensor some = ones({2, 3, 4}, float32, device), none = empty({2, 0, 4}, float32, device);
    EXPECT_EQ(scaled_dot_product_attention(none, some, some).shape(), (Shape{2, 0, 4}));
    expect_close(scaled_dot_product_attention(some, none, none), std::vector<double>(24, 0.0), 0, 0);
    const Tensor narrow = empty({2, 3, 0}, float32, device);  // all scores are 0
    expect_close(scaled_dot_product_attention(narrow, narrow, some), std::vector<double>(24, 1.0), 1e-6, 0);
  }
}

TEST(Attention, ThreadsDoNotChangeBits) {
  const int before = num_threads();
  const Tensor dy = randn({6, 50, 7});
  const auto run = [&](const Tensor& x, int threads) {
    set_num_threads(threads);
    const Tensor leaf = x.detach().requires_grad_();
    const Tensor y = scaled_dot_product_attention(leaf, leaf, slice(leaf, 2, 0, 7), {.causal = true});
    y.backward(dy);
    return Tensors{y.detach(), leaf.grad()};
  };
  const Tensor x = randn({6, 50, 9});
  const Tensors one = run(x, 1);
  for (const int threads : {2, 5}) {
    const Tensors many = run(x, threads);
    for (std::size_t i = 0; i < one.size(); ++i) {
      EXPECT_EQ(std::memcmp(one[i].raw_data(), many[i].raw_data(), one[i].bytes()), 0) << i << ", " << threads;
    }
  }
  set_num_threads(before);
}

TEST(Attention, Errors) {
  const Tensor x = ones({2, 3, 4});
  const auto attention = [](const Tensor& q, const Tensor& k, const Tensor& v) {
    return scaled_dot_product_attention(q, k, v);
  };
  expect_error([&] { attention(x, ones({3, 4}), x); }, "scaled_dot_product_attention: expected q, k and v of shapes");
  expect_error([&] { attention(x, ones({1, 3, 4}), x); }, "with equal leading axes, got [2, 3, 4], [1, 3, 4]");
  expect_error([&] { attention(x, ones({2, 3, 5}), x); }, "expected k with a last axis of 4 as q's, got [2, 3, 5]");
  expect_error([&] { attention(x, x, ones({2, 4, 4})); }, "expected v with 3 rows as k, got [2, 4, 4]");
  expect_error([&] { attention(x, x, ones({2, 3, 4}, float64)); }, "expected one floating dtype");
  expect_error([&] { scaled_dot_product_attention(x, x, x, {.dropout = 1}); }, "expected dropout in [0, 1), got 1");
}

}  // namespace

#include <gtest/gtest.h>

#include <cstring>

#include "tests/depth.h"
#include "tests/launches.h"
#include "tests/rows_close.h"
#include "tests/support.h"
#include <mica/autograd/grad.h>
#include <mica/autograd/gradcheck.h>
#include <mica/core/copy.h>
#include <mica/core/parallel.h>
#include <mica/core/rng.h>
#include <mica/ops/attention/attention.h>
#include <mica/ops/attention/detail/attention_plan.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/elementwise/where.h>
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

// y and the gradients by their definitions, for (…, H, T, D), (…, Hkv, S, D), (…, Hkv, S, Dv).
struct Reference {
  Sums y, dq, dk, dv;
};

struct ReferenceOptions {
  bool causal = false;
  std::int64_t offset = 0;
  double scale = 1;
  std::vector<double> added = {};  // to the scores (…, H, T, S), unless empty
  double least = 0;                // weights and gradients of scores that are smaller count as large as this
};

Reference reference(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& dy,
                    const ReferenceOptions& options) {
  const std::int64_t width = q.size(-1), queries = q.size(-2), keys = k.size(-2), values = v.size(-1);
  const std::int64_t items = q.numel() / (queries * width);
  const std::int64_t group = q.dim() >= 3 ? q.size(-3) / k.size(-3) : 1;  // heads that share a key head
  const std::vector<double> qs = to_vector<double>(q), ks = to_vector<double>(k), vs = to_vector<double>(v);
  const std::vector<double> gs = to_vector<double>(dy);
  Reference r{Sums(gs.size()), Sums(qs.size()), Sums(ks.size()), Sums(vs.size())};
  for (std::int64_t n = 0; n < items; ++n) {
    for (std::int64_t i = 0; i < queries; ++i) {
      const std::int64_t row = n * queries + i, first = n / group * keys;
      const double* const query = &qs[row * width];
      const double* const g = &gs[row * values];
      const std::int64_t seen = options.causal ? std::clamp<std::int64_t>(i + 1 + options.offset, 0, keys) : keys;
      std::vector<double> p(seen), dp(seen), dp_size(seen);
      double most = -INFINITY, sum = 0, mean = 0, mean_size = 0;
      for (std::int64_t j = 0; j < seen; ++j) {
        for (std::int64_t d = 0; d < width; ++d) {
          p[j] += options.scale * query[d] * ks[(first + j) * width + d];
        }
        p[j] += options.added.empty() ? 0 : options.added[row * keys + j];
        most = std::max(most, p[j]);
      }
      if (most == -INFINITY) {
        continue;  // sees nothing
      }
      for (double& x : p) {
        x = std::exp(x - most);
        sum += x;
      }
      for (std::int64_t j = 0; j < seen; ++j) {
        p[j] /= sum;
        for (std::int64_t d = 0; d < values; ++d) {
          const double value = vs[(first + j) * values + d];
          const double size = std::max(p[j], options.least);
          r.y.add(row * values + d, p[j] * value, size * value);
          r.dv.add((first + j) * values + d, p[j] * g[d], size * g[d]);
          dp[j] += g[d] * value;
          dp_size[j] = std::hypot(dp_size[j], g[d] * value);
        }
        mean += p[j] * dp[j];
        mean_size += p[j] * dp_size[j];
      }
      for (std::int64_t j = 0; j < seen; ++j) {
        const double dscore = options.scale * p[j] * (dp[j] - mean);
        const double size = std::max(std::abs(options.scale) * p[j] * (dp_size[j] + mean_size), options.least);
        for (std::int64_t d = 0; d < width; ++d) {
          const double key = ks[(first + j) * width + d];
          r.dq.add(row * width + d, dscore * key, size * key);
          r.dk.add((first + j) * width + d, dscore * query[d], size * query[d]);
        }
      }
    }
  }
  return r;
}

void expect_sums(const Tensor& got, const Sums& expected, double tolerance, const std::string& what) {
  std::vector<double> scales = expected.scales;
  for (double& scale : scales) {
    scale = std::max(scale, 1e-30);
  }
  expect_rows_close(got, expected.values, scales, 1, tolerance, what);
}

// Error relative to the size of the terms, for results computed in at least float32 and rounded once.
double tolerance_of(DType dtype) { return dtype == float64 ? 1e-12 : 2e-5; }

struct Sizes {
  std::int64_t queries, keys, width, values;
};

TEST(Attention, MatchesDefinition) {
  // Rows of one element, shorter and longer than a packet or a warp, and for each CUDA kernel.
  const std::vector<Sizes> sizes{{1, 1, 1, 1},   {1, 5, 3, 2},    {5, 5, 4, 4},   {7, 3, 4, 5},  {3, 9, 4, 6},
                                 {33, 33, 8, 8}, {70, 70, 8, 16}, {2, 300, 4, 4}, {300, 2, 4, 4}};
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, float16, bfloat16}) {
      const double tolerance = tolerance_of(dtype);
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
          const Reference expected = reference(q, k, v, dy, {.causal = causal, .scale = scale});
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
        const Reference expected = reference(q, k, v, dy, {.scale = 1.5});
        expect_sums(y, expected.y, tolerance_of(dtype), "y");
        expect_sums(q.grad(), expected.dq, tolerance_of(dtype), "dq");
        expect_sums(k.grad(), expected.dk, tolerance_of(dtype), "dk");
        expect_sums(v.grad(), expected.dv, tolerance_of(dtype), "dv");
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
    // Equal scores and values of 1: y is the share of kept weights, divided by 1 − p.
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

// 0 for dropped weights, else 1: (items, queries, keys). From equal scores and values that identify the keys.
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
      const double share = std::clamp(std::round(p * 256), 1.0, 255.0) / 256;  // the dropped share
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

// The choice of dropped weights depends on their position and the key alone, not on T, S or the device.
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

TEST(Attention, CausalRowsDoNotDependOnLaterKeys) {
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

// Large scores reveal a rounding of scores to 16 bits.
TEST(Attention, SixteenBitsRoundTheResultOnly) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float16, bfloat16}) {
      for (const double sigma : {1, 2, 4}) {
        const auto draw = [&](const Shape& shape) { return (randn(shape, float32, device) * sigma).to(dtype); };
        const Tensor q = draw({2, 3, 40, 64}).requires_grad_(), k = draw({2, 3, 70, 64}).requires_grad_();
        const Tensor v = randn({2, 3, 70, 64}, dtype, device).requires_grad_();
        const Tensor dy = randn({2, 3, 40, 64}, dtype, device);
        const Tensor y = scaled_dot_product_attention(
            q, k, v, {.causal = true, .causal_offset = 30, .backend = AttentionBackend::composed});
        y.backward(dy);
        const Reference expected = reference(q, k, v, dy, {.causal = true, .offset = 30, .scale = 0.125});
        const std::string what = fmt::format("{} on {}, sigma {}", dtype, device, sigma);
        const double tolerance = tolerance_of(dtype) * sigma * sigma;  // float32's own error grows with the scores
        expect_sums(y, expected.y, tolerance, what + " y");
        expect_sums(q.grad(), expected.dq, tolerance, what + " dq");
        expect_sums(k.grad(), expected.dk, tolerance, what + " dk");
        expect_sums(v.grad(), expected.dv, tolerance, what + " dv");
      }
    }
  }
}

TEST(Attention, SixteenBitScoresBeyondTheirRange) {
  for (const Device device : test_devices()) {
    const Tensor x = full({1, 2, 64}, 40, float16, device);  // scores of 102400 before scaling
    expect_close(scaled_dot_product_attention(x, x, x), std::vector<double>(128, 40), 0, 0);
  }
}

TEST(Attention, MasksAgreeWithTheDefinition) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, bfloat16}) {
      for (const Shape& shape : {Shape{2, 3, 5, 7}, Shape{2, 1, 1, 7}, Shape{5, 7}, Shape{1, 3, 5, 1}}) {
        for (const bool boolean_mask : {true, false}) {
          const Tensor q = randn({2, 3, 5, 4}, dtype, device).requires_grad_();
          const Tensor k = randn({2, 3, 7, 4}, dtype, device).requires_grad_();
          const Tensor v = randn({2, 3, 7, 6}, dtype, device).requires_grad_();
          const Tensor dy = randn({2, 3, 5, 6}, dtype, device);
          const Tensor mask = boolean_mask ? rand(shape, float32, device) < 0.6 : randn(shape, float32, device);
          const Tensor spread = broadcast_view(mask, {2, 3, 5, 7});
          std::vector<double> added = to_vector<double>(spread);
          if (boolean_mask) {
            for (double& x : added) {
              x = x != 0 ? 0 : -INFINITY;
            }
          }
          const Tensor y = scaled_dot_product_attention(q, k, v, {.scale = -0.5, .mask = mask});
          y.backward(dy);
          const Reference expected = reference(q, k, v, dy, {.scale = -0.5, .added = added});
          const double tolerance = tolerance_of(dtype);
          const std::string what = fmt::format("{} on {}, mask {} {}", dtype, device, mask.dtype(), shape);
          expect_sums(y, expected.y, tolerance, what);
          expect_sums(q.grad(), expected.dq, tolerance, what + " dq");
          expect_sums(k.grad(), expected.dk, tolerance, what + " dk");
          expect_sums(v.grad(), expected.dv, tolerance, what + " dv");
        }
      }
    }
  }
}

TEST(Attention, FusedKernelsTakeMasks) {
  if (!cuda_available()) {
    GTEST_SKIP() << "no GPU";
  }
  const Device device = Device::cuda();
  std::size_t turn = 0;
  for (const DType dtype : {bfloat16, float16}) {
    for (const std::int64_t width : {32, 64, 80, 128}) {
      const std::int64_t batch = 2, heads = 4, queries = 77, keys = 130;
      for (const Shape& shape : {Shape{batch, 1, 1, keys}, Shape{queries, keys}, Shape{batch, heads, queries, keys},
                                 Shape{1, heads, queries, 1}}) {
        for (const DType mask_dtype : {boolean, float32, dtype}) {
          const std::int64_t key_heads = turn % 2 == 0 ? 4 : 2;
          const bool causal = turn % 3 == 0;
          ++turn;
          const Tensor q = randn({batch, heads, queries, width}, dtype, device).requires_grad_();
          const Tensor k = randn({batch, key_heads, keys, width}, dtype, device).requires_grad_();
          const Tensor v = randn({batch, key_heads, keys, width}, dtype, device).requires_grad_();
          const Tensor dy = randn({batch, heads, queries, width}, dtype, device);
          const Tensor seen = rand(shape, float32, device) < 0.6;
          const Tensor mask = mask_dtype == boolean ? seen : where(seen, randn(shape, mask_dtype, device), -INFINITY);
          std::vector<double> added = to_vector<double>(broadcast_view(mask, {batch, heads, queries, keys}));
          if (mask_dtype == boolean) {
            for (double& x : added) {
              x = x != 0 ? 0 : -INFINITY;
            }
          }
          cuda::LaunchRecord record;
          const Tensor y =
              scaled_dot_product_attention(q, k, v, {.causal = causal, .causal_offset = causal ? 20 : 0, .mask = mask});
          y.backward(dy);
          const std::string what =
              fmt::format("{}, D {}, mask {} {}, causal {}", dtype, width, mask_dtype, shape, causal);
          expect_launched(record, device,
                          {"flash_masked_forward_kernel", "flash_stats_kernel", "flash_masked_query_gradient_kernel",
                           "flash_masked_key_gradient_kernel"},
                          what);
          const double share = 4 * epsilon_of(dtype);
          const Reference expected = reference(q, k, v, dy,
                                               {.causal = causal,
                                                .offset = 20,
                                                .scale = 1 / std::sqrt(static_cast<double>(width)),
                                                .added = added,
                                                // The steps of weights stay below that.
                                                .least = dtype == float16 ? 0x1p-14 : 0});
          expect_sums(y, expected.y, share, what + " y");
          expect_sums(q.grad(), expected.dq, share, what + " dq");
          expect_sums(k.grad(), expected.dk, share, what + " dk");
          expect_sums(v.grad(), expected.dv, share, what + " dv");
        }
      }
    }
  }
}

// With dropout, and for derivatives of every order, the masked kernels and the composed ops agree.
TEST(Attention, FusedKernelsTakeMasksAndDropout) {
  if (!cuda_available()) {
    GTEST_SKIP() << "no GPU";
  }
  const Device device = Device::cuda();
  const Tensor qkv = randn({2, 90, 3 * 128}, bfloat16, device).requires_grad_();
  const Tensor dy = randn({2, 90, 128}, bfloat16, device), weight = randn({2, 90, 3 * 128}, bfloat16, device);
  const Tensor mask = rand({2, 1, 1, 90}, float32, device) < 0.7;
  const auto run = [&](AttentionBackend backend) {
    manual_seed(8);
    const Tensor y = self_attention(qkv, 2, {.causal = true, .dropout = 0.3, .mask = mask, .backend = backend});
    const Tensor plain = autograd::grad({y}, {qkv}, {dy}, {.retain_graph = true})[0];
    const Tensor first = autograd::grad({y}, {qkv}, {dy}, {.create_graph = true})[0];
    return Tensors{y.detach(), plain, first.detach(), autograd::grad({first}, {qkv}, {weight})[0]};
  };
  cuda::LaunchRecord record;
  const Tensors got = run(AttentionBackend::flash);
  expect_launched(record, device, {"flash_masked_forward_kernel", "flash_masked_key_gradient_kernel"});
  const Tensors wanted = run(AttentionBackend::composed);
  for (std::size_t i = 0; i < got.size(); ++i) {
    // Relative to the whole: if a query sees one key only, its gradient is 0 or a rounding error. A score's gradient is
    // the difference of two sums of 64 terms of about 1.4, each rounded to 8 bits: 11 · 2⁻⁸ of an element of the keys,
    // times the scale of 1/8, and the largest of 69,120 is four times as large.
    expect_rows_close(got[i], to_vector<double>(wanted[i]), wanted[i].numel(), 5e-2, fmt::format("result {}", i));
  }
}

// A trainable mask, such as a position bias, gets its gradient.
TEST(Attention, GradientsOfMasks) {
  for (const Device device : test_devices()) {
    const Tensor x = randn({1, 2, 20, 32}, bfloat16, device);
    const Tensor mask = randn({2, 20, 20}, float32, device).requires_grad_();
    scaled_dot_product_attention(x, x, x, {.mask = mask}).backward(randn({1, 2, 20, 32}, bfloat16, device));
    ASSERT_TRUE(mask.grad().defined());
    EXPECT_EQ(mask.grad().shape(), mask.shape());
  }
}

TEST(Attention, RowsThatSeeNothingAreZeros) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, float16, bfloat16}) {
      for (const std::int64_t keys : {5, 100, 2000}) {  // for each CUDA kernel
        // Of the second kind, 16-bit tensors go to the fused kernel on CUDA.
        for (const Shape& rows : {Shape{1}, Shape{2, 2}}) {
          const std::int64_t width = rows.size() == 1 ? 8 : 32;
          const auto shape = [&](std::int64_t length) {
            Shape whole = rows;
            whole.push_back(length);
            whole.push_back(width);
            return whole;
          };
          const Tensor q = randn(shape(3), dtype, device).requires_grad_();
          const Tensor k = randn(shape(keys), dtype, device).requires_grad_();
          const Tensor v = randn(shape(keys), dtype, device).requires_grad_();
          const Tensor mask = ones({3, keys}, float32, device) > 0;
          fill_data(slice(mask, 0, 1, 2), 0);
          const Tensor added = where(mask, zeros({3, keys}, float32, device), -INFINITY);
          for (const AttentionOptions& options : {AttentionOptions{.mask = mask}, AttentionOptions{.mask = added},
                                                  AttentionOptions{.causal = true, .causal_offset = -2}}) {
            for (const Tensor& x : {q, k, v}) {
              x.set_grad({});
            }
            const std::vector<double> zeros_of_row(static_cast<std::size_t>(q.numel() / 3), 0.0);
            const Tensor y = scaled_dot_product_attention(q, k, v, options);
            y.backward(ones(shape(3), dtype, device));
            expect_close(select(y, -2, 1), zeros_of_row, 0, 0, "y of the row that sees nothing");
            expect_close(select(q.grad(), -2, 1), zeros_of_row, 0, 0, "its dq");
            for (const Tensor& x : {y, q.grad(), k.grad(), v.grad()}) {
              for (const double element : to_vector<double>(x)) {
                ASSERT_TRUE(std::isfinite(element));
              }
            }
            bool others = false;
            for (const double element : to_vector<double>(select(y, -2, 2))) {
              others = others || element != 0;
            }
            EXPECT_TRUE(others) << "the last row sees a key";
          }
        }
      }
    }
  }
}

TEST(Attention, CausalOffsetsAgreeWithMasks) {
  for (const Device device : test_devices()) {
    for (const Sizes& s : {Sizes{5, 5, 4, 4}, Sizes{3, 9, 4, 4}, Sizes{9, 3, 4, 4}, Sizes{40, 300, 4, 4}}) {
      const Tensor q = randn({2, s.queries, 4}, float64, device), k = randn({2, s.keys, 4}, float64, device);
      const Tensor v = randn({2, s.keys, 4}, float64, device);
      for (const std::int64_t offset : {std::int64_t{0}, s.keys - s.queries, std::int64_t{-1}, std::int64_t{2}}) {
        const Tensor row = reshape(arange(s.queries, int64, device), {s.queries, 1});
        const Tensor seen = arange(s.keys, int64, device) <= row + static_cast<double>(offset);
        expect_close(scaled_dot_product_attention(q, k, v, {.causal = true, .causal_offset = offset}),
                     scaled_dot_product_attention(q, k, v, {.mask = seen}), 1e-12, 1e-12,
                     fmt::format("T {}, S {}, offset {}", s.queries, s.keys, offset));
      }
    }
  }
}

TEST(Attention, GroupedQueriesShareKeys) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, bfloat16}) {
      for (const std::int64_t key_heads : {1, 2, 6}) {
        const Tensor q = transpose(randn({2, 5, 6, 4}, dtype, device), 1, 2).detach().requires_grad_();
        const Tensor k = randn({2, key_heads, 7, 4}, dtype, device).requires_grad_();
        const Tensor v = randn({2, key_heads, 7, 3}, dtype, device).requires_grad_();
        const Tensor dy = randn({2, 6, 5, 3}, dtype, device);
        const Tensor y = scaled_dot_product_attention(q, k, v, {.causal = true, .causal_offset = 2});
        ASSERT_EQ(y.shape(), dy.shape());
        y.backward(dy);
        const Reference expected = reference(q, k, v, dy, {.causal = true, .offset = 2, .scale = 0.5});
        const double tolerance = tolerance_of(dtype);
        const std::string what = fmt::format("{} on {}, {} key heads", dtype, device, key_heads);
        expect_sums(y, expected.y, tolerance, what);
        expect_sums(q.grad(), expected.dq, tolerance, what + " dq");
        expect_sums(k.grad(), expected.dk, tolerance, what + " dk");
        expect_sums(v.grad(), expected.dv, tolerance, what + " dv");
      }
    }
  }
}

TEST(Attention, GradientsWithMasksAndGroups) {
  for (const Device device : test_devices()) {
    const Tensor seen = rand({4, 5}, float32, device) < 0.7;
    const Tensors inputs{randn({2, 4, 4, 3}, float64, device), randn({2, 2, 5, 3}, float64, device),
                         randn({2, 2, 5, 2}, float64, device), randn({1, 4, 1, 5}, float64, device)};
    const Tensors without_mask{inputs[0], inputs[1], inputs[2]};
    for (const AttentionBackend backend : {AttentionBackend::automatic, AttentionBackend::composed}) {
      const auto with_added = [&](const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask) {
        return scaled_dot_product_attention(q, k, v,
                                            {.causal = true, .causal_offset = 1, .mask = mask, .backend = backend});
      };
      EXPECT_TRUE(autograd::gradcheck(with_added, inputs));
      EXPECT_TRUE(autograd::gradgradcheck(with_added, inputs));
      const auto with_hidden = [&](const Tensor& q, const Tensor& k, const Tensor& v) {
        return scaled_dot_product_attention(q, k, v, {.mask = seen, .backend = backend});
      };
      EXPECT_TRUE(autograd::gradcheck(with_hidden, without_mask));
      EXPECT_TRUE(autograd::gradgradcheck(with_hidden, without_mask));
    }
  }
}

TEST(Attention, GradientsOfTheBlockedKernel) {
  for (const AttentionOptions& plain : {AttentionOptions{}, AttentionOptions{.causal = true},
                                        AttentionOptions{.causal = true, .causal_offset = 2, .scale = -0.6},
                                        AttentionOptions{.causal = true, .causal_offset = -2}}) {
    AttentionOptions options = plain;
    options.backend = AttentionBackend::blocked;
    const auto attention = [&](const Tensor& q, const Tensor& k, const Tensor& v) {
      return scaled_dot_product_attention(q, k, v, options);
    };
    // Values of another width, shared key heads, and more keys than a block.
    EXPECT_TRUE(autograd::gradcheck(
        attention, {randn({2, 4, 3, 2}, float64), randn({2, 2, 5, 2}, float64), randn({2, 2, 5, 3}, float64)}));
    EXPECT_TRUE(autograd::gradgradcheck(
        attention, {randn({1, 2, 3, 2}, float64), randn({1, 1, 4, 2}, float64), randn({1, 1, 4, 2}, float64)}));
    const Tensor q = randn({1, 2, 70, 5}, float64).requires_grad_(),
                 k = randn({1, 1, 600, 5}, float64).requires_grad_();
    const Tensor v = randn({1, 1, 600, 7}, float64).requires_grad_(), dy = randn({1, 2, 70, 7}, float64);
    options.causal_offset = options.causal ? options.causal_offset + 60 : 0;
    attention(q, k, v).backward(dy);
    const double scale = options.scale.value_or(1 / std::sqrt(5.0));
    const Reference expected =
        reference(q, k, v, dy, {.causal = options.causal, .offset = options.causal_offset, .scale = scale});
    expect_sums(attention(q, k, v), expected.y, 1e-12, "y");
    expect_sums(q.grad(), expected.dq, 1e-12, "dq");
    expect_sums(k.grad(), expected.dk, 1e-12, "dk");
    expect_sums(v.grad(), expected.dv, 1e-12, "dv");
  }
}

TEST(Attention, PackedMatchesSeparate) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, bfloat16}) {
      const Tensor qkv = randn({2, 9, 3 * 24}, dtype, device).requires_grad_();
      const Tensor dy = randn({2, 9, 24}, dtype, device);
      const AttentionOptions options{.causal = true};
      const Tensor y = self_attention(qkv, 3, options);
      ASSERT_EQ(y.shape(), dy.shape());
      y.backward(dy);
      const Tensor gradient = qkv.grad();
      qkv.set_grad({});
      const Tensors parts = split(qkv, 24, 2);
      const auto by_head = [](const Tensor& x) { return transpose(reshape(x, {2, 9, 3, 8}), 1, 2); };
      const Tensor wanted =
          scaled_dot_product_attention(by_head(parts[0]), by_head(parts[1]), by_head(parts[2]), options);
      wanted.backward(by_head(dy));
      expect_close(y, reshape(transpose(wanted, 1, 2), {2, 9, 24}), 0, 0);
      expect_close(gradient, qkv.grad(), 0, 0);
    }
  }
}

// The available kernels, on problems that they support: compared with the definition, repeated bits, strided operands,
// and second derivatives by the composed path.
struct FusedCase {
  std::int64_t batch, heads, key_heads, queries, keys, width;
  bool causal;
  std::int64_t offset;
};

bool takes(AttentionBackend backend, const FusedCase& c, DType dtype, Device device) {
  const Tensor q = empty({c.batch, c.heads, c.queries, c.width}, dtype, device);
  const Tensor k = empty({c.batch, c.key_heads, c.keys, c.width}, dtype, device);
  try {
    scaled_dot_product_attention(q, k, k, {.causal = c.causal, .causal_offset = c.offset, .backend = backend});
    return true;
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("backend does not support"), std::string::npos) << error.what();
    return false;
  }
}

const std::vector<FusedCase>& fused_cases() {
  static const std::vector<FusedCase> cases{
      {1, 1, 1, 64, 64, 64, false, 0},   {2, 3, 3, 128, 128, 64, true, 0},  {2, 3, 3, 100, 100, 64, true, 0},
      {1, 2, 2, 1, 1, 32, false, 0},     {1, 2, 2, 1, 130, 64, false, 0},   {2, 4, 2, 65, 65, 128, true, 0},
      {1, 8, 1, 70, 200, 64, true, 130}, {1, 2, 2, 200, 70, 64, true, 0},   {1, 2, 2, 50, 190, 80, false, 0},
      {1, 3, 3, 257, 257, 96, true, 0},  {1, 2, 1, 300, 513, 40, false, 0}, {3, 2, 2, 64, 192, 128, true, 128},
      {1, 1, 1, 512, 512, 64, true, 0},
  };
  return cases;
}

TEST(Attention, FusedKernelsAgreeWithTheDefinition) {
  int runs = 0;
  OneIn two(2);  // each problem with one of the dtypes
  for (const Device device : test_devices()) {
    for (const AttentionBackend backend :
         {AttentionBackend::blocked, AttentionBackend::flash, AttentionBackend::cudnn}) {
      for (const DType dtype : {bfloat16, float16}) {
        for (const FusedCase& c : fused_cases()) {
          if (!takes(backend, c, dtype, device) || two.skips()) {
            continue;
          }
          const double sigma = c.queries % 2 == 0 ? 1 : 4;
          const auto draw = [&](const Shape& shape) { return (randn(shape, float32, device) * sigma).to(dtype); };
          const Tensor q = draw({c.batch, c.heads, c.queries, c.width});
          const Tensor k = draw({c.batch, c.key_heads, c.keys, c.width});
          const Tensor v = randn({c.batch, c.key_heads, c.keys, c.width}, dtype, device);
          const Tensor dy = randn({c.batch, c.heads, c.queries, c.width}, dtype, device);
          AttentionOptions options{.causal = c.causal, .causal_offset = c.offset};
          ++runs;
          options.backend = backend;
          const auto run = [&] {
            const Tensor qs = q.detach().requires_grad_(), ks = k.detach().requires_grad_();
            const Tensor vs = v.detach().requires_grad_();
            const Tensor y = scaled_dot_product_attention(qs, ks, vs, options);
            y.backward(dy);
            return Tensors{y.detach(), qs.grad(), ks.grad(), vs.grad()};
          };
          cuda::LaunchRecord record;
          const Tensors got = run(), again = run();
          const double scale = 1 / std::sqrt(static_cast<double>(c.width));
          // Weights and the gradients of scores are rounded to 16 bits for the tensor cores. Near 0 float16 has steps
          // of 2⁻²⁴.
          const double share = 4 * epsilon_of(dtype);
          const Reference expected = reference(
              q, k, v, dy,
              {.causal = c.causal, .offset = c.offset, .scale = scale, .least = dtype == float16 ? 0x1p-14 : 0});
          const std::string what = fmt::format("backend {}, {}, sigma {}, B {} H {}/{} T {} S {} D {} causal {} + {}",
                                               static_cast<int>(backend), dtype, sigma, c.batch, c.heads, c.key_heads,
                                               c.queries, c.keys, c.width, c.causal, c.offset);
          expect_sums(got[0], expected.y, share, what + " y");
          expect_sums(got[1], expected.dq, share, what + " dq");
          expect_sums(got[2], expected.dk, share, what + " dk");
          expect_sums(got[3], expected.dv, share, what + " dv");
          for (std::size_t i = 0; i < got.size(); ++i) {
            expect_same_bits(again[i], got[i], what + ": the same again");
          }
          if (backend == AttentionBackend::cudnn) {
            expect_launched(record, device, {"cudnn_attention_forward", "cudnn_attention_backward"}, what);
          }
        }
      }
    }
  }
  if (runs == 0) {
    GTEST_SKIP() << "no fused kernel here";
  }
}

TEST(Attention, FusedKernelsReadAndWritePackedTensors) {
  int runs = 0;
  for (const Device device : test_devices()) {
    for (const AttentionBackend backend :
         {AttentionBackend::blocked, AttentionBackend::flash, AttentionBackend::cudnn}) {
      if (!takes(backend, {2, 2, 2, 100, 100, 64, true, 0}, bfloat16, device)) {
        continue;
      }
      ++runs;
      const Tensor qkv = randn({2, 100, 3 * 128}, bfloat16, device).requires_grad_();
      const Tensor dy = randn({2, 100, 128}, bfloat16, device);
      AttentionOptions options{.causal = true};
      const auto by_head = [](const Tensor& x) { return transpose(reshape(x, {2, 100, 2, 64}), 1, 2); };
      const Tensors parts = split(qkv.detach(), 128, 2);
      const Tensor q = contiguous(by_head(parts[0])), k = contiguous(by_head(parts[1]));
      const Tensor v = contiguous(by_head(parts[2]));
      options.backend = backend;
      for (const Tensor& x : {q, k, v}) {
        x.requires_grad_();
      }
      const Tensor y = self_attention(qkv, 2, options), wanted = scaled_dot_product_attention(q, k, v, options);
      y.backward(dy);
      wanted.backward(by_head(dy));
      expect_close(by_head(y), wanted, 0, 0);
      const Tensors gradients = split(qkv.grad(), 128, 2);
      expect_close(by_head(gradients[0]), q.grad(), 0, 0);
      expect_close(by_head(gradients[1]), k.grad(), 0, 0);
      expect_close(by_head(gradients[2]), v.grad(), 0, 0);
    }
  }
  if (runs == 0) {
    GTEST_SKIP() << "no fused kernel here";
  }
}

TEST(Attention, SecondDerivativesOfFusedKernelsAreTheComposedOnes) {
  int runs = 0;
  for (const Device device : test_devices()) {
    for (const AttentionBackend backend :
         {AttentionBackend::blocked, AttentionBackend::flash, AttentionBackend::cudnn}) {
      if (!takes(backend, {1, 2, 2, 64, 64, 64, true, 0}, bfloat16, device)) {
        continue;
      }
      ++runs;
      const Tensor qkv = randn({1, 64, 3 * 128}, bfloat16, device).requires_grad_();
      const Tensor dy = randn({1, 64, 128}, bfloat16, device), weight = randn({1, 64, 3 * 128}, bfloat16, device);
      for (const double dropout : {0.0, 0.3}) {
        if (dropout > 0 && backend == AttentionBackend::cudnn) {
          continue;
        }
        const auto second = [&](AttentionBackend which) {
          manual_seed(5);
          const Tensor y = self_attention(qkv, 2, {.causal = true, .dropout = dropout, .backend = which});
          const Tensor first = autograd::grad({y}, {qkv}, {dy}, {.create_graph = true})[0];
          return autograd::grad({first}, {qkv}, {weight})[0];
        };
        const Tensor wanted = second(AttentionBackend::composed);
        expect_rows_close(second(backend), to_vector<double>(wanted), wanted.size(-1), 1e-2,
                          fmt::format("second derivative, dropout {}", dropout));
      }
    }
  }
  if (runs == 0) {
    GTEST_SKIP() << "no fused kernel here";
  }
}

TEST(Attention, PlanChoosesByTheProblem) {
  using enum AttentionBackend;
  const AttentionProblem gpt2{.cuda = true,
                              .wgmma = true,
                              .dtype = bfloat16,
                              .items = 32 * 12,
                              .key_items = 32 * 12,
                              .queries = 1024,
                              .keys = 1024,
                              .width = 64,
                              .value_width = 64};
  const auto with = [&](auto change) {
    AttentionProblem problem = gpt2;
    change(problem);
    return plan_attention(problem);
  };
  const std::vector flash_first{flash, cudnn, composed}, cudnn_first{cudnn, flash, composed};
  EXPECT_EQ(plan_attention(gpt2), flash_first);
  EXPECT_EQ(with([](auto& p) { p.dtype = float16; }), flash_first);
  // Wide heads, and GPUs without the fast kernel: cuDNN, unless lengths vary or its workspace is large.
  EXPECT_EQ(with([](auto& p) { p.width = p.value_width = 128; }), cudnn_first);
  EXPECT_EQ(with([](auto& p) { p.wgmma = false; }), cudnn_first);
  EXPECT_EQ(with([](auto& p) { p.width = p.value_width = 128, p.queries = 1023; }), flash_first);
  EXPECT_EQ(with([](auto& p) { p.width = p.value_width = 128, p.keys = 1; }), flash_first);
  EXPECT_EQ(with([](auto& p) { p.width = p.value_width = 128, p.items = 512; }), cudnn_first);
  EXPECT_EQ(with([](auto& p) { p.width = p.value_width = 128, p.items = 513; }), flash_first);
  const std::vector only_composed{composed};
  EXPECT_EQ(with([](auto& p) { p.width = p.value_width = 136; }), only_composed);
  EXPECT_EQ(with([](auto& p) { p.width = p.value_width = 24; }), only_composed);
  EXPECT_EQ(with([](auto& p) { p.width = p.value_width = 68; }), only_composed);
  EXPECT_EQ(with([](auto& p) { p.value_width = 128; }), only_composed);
  EXPECT_EQ(with([](auto& p) { p.dtype = float32; }), only_composed);
  EXPECT_EQ(with([](auto& p) { p.masked = true; }), (std::vector{flash, composed}));
  EXPECT_EQ(with([](auto& p) { p.masked = p.mask_gradient = true; }), only_composed);
  EXPECT_EQ(with([](auto& p) { p.drops = true; }), (std::vector{flash, composed}));
  EXPECT_EQ(with([](auto& p) { p.empty = true; }), only_composed);
  EXPECT_EQ(with([](auto& p) { p.rank = 3; }), only_composed);
  const auto on_cpu = [&](std::int64_t key_items, std::int64_t queries, DType dtype) {
    return with([&](auto& p) {
      p.cuda = false;
      p.key_items = key_items;
      p.queries = queries;
      p.dtype = dtype;
    });
  };
  const std::vector blocked_first{blocked, composed}, composed_first{composed, blocked};
  EXPECT_EQ(on_cpu(4, 64, float32), blocked_first);
  EXPECT_EQ(on_cpu(4, 64, float64), blocked_first);
  EXPECT_EQ(on_cpu(3, 64, bfloat16), composed_first);
  EXPECT_EQ(on_cpu(1, 4096, float32), blocked_first);
}

TEST(Attention, OptionErrors) {
  const Tensor x = ones({2, 4, 3, 8});
  const auto attention = [&](const AttentionOptions& options) { scaled_dot_product_attention(x, x, x, options); };
  expect_error([&] { attention({.mask = ones({3, 3}, int64)}); }, "expected a boolean or floating mask, got int64");
  expect_error([&] { attention({.mask = ones({3, 2})}); }, "expected a mask that broadcasts to the scores' shape");
  expect_error([&] { attention({.mask = ones({1, 2, 4, 3, 3})}); }, "[2, 4, 3, 3], got [1, 2, 4, 3, 3]");
  expect_error([&] { attention({.causal_offset = 4}); }, "expected causal_offset in [-3, 3]");
  expect_error([&] { attention({.causal_offset = INT64_MIN}); }, "expected causal_offset in [-3, 3]");
  expect_error([&] { attention({.backend = AttentionBackend::cudnn}); },
               "the cudnn backend does not support q [2, 4, 3, 8]");
  expect_error(
      [&] {
        scaled_dot_product_attention(x, ones({2, 3, 3, 8}), ones({2, 3, 3, 8}));
      },
      "expected k and v with heads that divide the 4 of q");
  expect_error([&] { self_attention(ones({2, 3, 25}), 1); }, "self_attention: expected qkv of shape (B, T, 3");
  expect_error([&] { self_attention(ones({2, 24}), 1); }, "expected qkv of shape");
  expect_error([&] { self_attention(ones({2, 3, 24}), 0); }, "at least one head");
  expect_error([&] { self_attention(ones({2, 3, 24}, int64), 1); }, "expected a floating dtype, got int64");
}

TEST(Attention, Errors) {
  const Tensor x = ones({2, 3, 4});
  const auto attention = [](const Tensor& q, const Tensor& k, const Tensor& v) {
    return scaled_dot_product_attention(q, k, v);
  };
  expect_error([&] { attention(x, ones({3, 4}), x); }, "scaled_dot_product_attention: expected q, k and v of shapes");
  expect_error([&] { attention(x, ones({1, 3, 4}), x); }, "with equal leading axes, got [2, 3, 4], [1, 3, 4]");
  expect_error([&] { attention(x, ones({2, 3, 5}), x); }, "expected k with a last axis of 4, as in q, got [2, 3, 5]");
  expect_error([&] { attention(x, x, ones({2, 4, 4})); }, "expected v with 3 rows, as in k, got [2, 4, 4]");
  expect_error([&] { attention(x, x, ones({2, 3, 4}, float64)); }, "expected one floating dtype");
  expect_error([&] { scaled_dot_product_attention(x, x, x, {.dropout = 1}); }, "expected dropout in [0, 1), got 1");
}

}  // namespace

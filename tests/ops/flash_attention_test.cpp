// Tests the flash attention kernels directly. attention_fused_test.cpp tests them through the public function.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "tests/launches.h"
#include "tests/rows_close.h"
#include "tests/support.h"
#include <mica/core/copy.h>
#include <mica/core/dispatch.h>
#include <mica/core/rng.h>
#include <mica/ops/attention/detail/attention_kernels.h>
#include <mica/ops/attention/detail/fused_attention_kernels.h>
#include <mica/ops/view/view.h>

using namespace mica;
using namespace mica::testing_support;

namespace flash_attention_test {

// Calls f(Cuda{}). Does not compile the call in a build without CUDA, where the functions that f calls do not exist.
template <class F>
void on_gpu(F f) {
  on_device(Device::cuda(), [&]<class Where>(Where where) {
    if constexpr (std::is_same_v<Where, Cuda>) {
      f(where);
    }
  });
}

enum class Layout {
  dense,   // each tensor is contiguous
  packed,  // q, k, v as slices of (B, T, (H + 2 Hkv) · D), out and dout as (B, T, H, D); T = S
  apart,   // (B, T, H, D) with a gap of 8 elements after each row
  shared,  // like dense, but k and v repeat one head by a stride of 0, which tensor maps do not support
};

struct Case {
  DType dtype;
  std::int64_t batches, heads, group, queries, keys, depth;
  bool causal;
  std::int64_t offset;
  Layout layout;
  double dropout_p = 0;

  WeightDropout dropout() const {
    return {.key = {.seed = 0x123456789, .offset = 40}, .threshold = WeightDropout::threshold_of(dropout_p)};
  }
  std::int64_t key_heads() const { return heads / group; }
  double scale() const { return 1 / std::sqrt(static_cast<double>(depth)); }
  std::string text() const {
    return fmt::format("{}, B {}, H {} / {}, T {}, S {}, D {}, {}, offset {}, layout {}, dropout {}", dtype, batches,
                       heads, group, queries, keys, depth, causal ? "causal" : "full", offset, static_cast<int>(layout),
                       dropout_p);
  }
};

// A tensor (B, H, rows, D) inside a buffer with guards at both ends.
constexpr std::int64_t kGuard = 64;
constexpr double kUnwritten = -7;

struct Slice {
  Tensor buffer;
  Tensor view;
};

Slice slice_of(const Case& c, std::int64_t heads, std::int64_t rows) {
  const bool by_rows = c.layout == Layout::packed || c.layout == Layout::apart;
  const std::int64_t row = by_rows ? heads * c.depth + (c.layout == Layout::apart ? 8 : 0) : c.depth;
  const std::int64_t head = by_rows ? c.depth : rows * c.depth;
  const std::int64_t batch = by_rows ? rows * row : heads * rows * c.depth;
  const Tensor buffer = full({c.batches * batch + 2 * kGuard}, kUnwritten, c.dtype, Device::cuda());
  return {buffer, as_strided(buffer, {c.batches, heads, rows, c.depth}, {batch, head, row, 1}, kGuard)};
}

struct Triple {
  Tensor buffer[3];  // of q, k and v; if packed, all three are the same buffer
  Tensor q, k, v;
};

Triple triple_of(const Case& c) {
  if (c.layout == Layout::packed) {
    const std::int64_t row = (c.heads + 2 * c.key_heads()) * c.depth;
    const Tensor buffer = full({c.batches * c.queries * row + 2 * kGuard}, kUnwritten, c.dtype, Device::cuda());
    const auto part = [&](std::int64_t first, std::int64_t heads) {
      return as_strided(buffer, {c.batches, heads, c.queries, c.depth}, {c.queries * row, c.depth, row, 1},
                        kGuard + first * c.depth);
    };
    return {{buffer, buffer, buffer},
            part(0, c.heads),
            part(c.heads, c.key_heads()),
            part(c.heads + c.key_heads(), c.key_heads())};
  }
  const Slice q = slice_of(c, c.heads, c.queries);
  const Slice k = slice_of(c, c.key_heads(), c.keys);
  const Slice v = slice_of(c, c.key_heads(), c.keys);
  return {{q.buffer, k.buffer, v.buffer}, q.view, k.view, v.view};
}

// Expects that elements outside of the views are unchanged.
void expect_untouched(const Tensor& buffer, const std::vector<Tensor>& views, const std::string& what) {
  const Tensor marks = full(buffer.shape(), 0, buffer.dtype(), buffer.device());
  for (const Tensor& view : views) {
    const Tensor own =
        as_strided(marks, view.shape(), view.strides(),
                   (view.raw_data() - buffer.raw_data()) / static_cast<std::int64_t>(size_of(view.dtype())));
    copy_into(own, full(view.shape(), 1, view.dtype(), view.device()));
  }
  const std::vector<double> is_own = to_vector<double>(marks);
  const std::vector<double> values = to_vector<double>(buffer);
  for (std::size_t i = 0; i < values.size(); ++i) {
    ASSERT_TRUE(is_own[i] != 0 || values[i] == kUnwritten) << what << ": element " << i << " was written";
  }
}

// Results by the definition in float64, and for each the sum of its terms' absolute values, to which rounding errors
// are proportional.
struct Values {
  std::vector<double> exact, sizes;
  explicit Values(std::int64_t count) : exact(count), sizes(count) {}
  void add(std::int64_t i, double value, double size) {
    exact[i] += value;
    sizes[i] += size;
  }
};

struct Reference {
  Values out, dq, dk, dv;
  std::vector<double> lse;
};

// What dropout multiplies each weight by, according to the CPU kernel.
std::vector<double> dropout_factors(const Case& c) {
  const Tensor weights = ones({c.batches, c.heads, c.queries, c.keys}, float64), factors = empty_like(weights);
  if (c.dropout_p == 0) {
    return to_vector<double>(weights);
  }
  kernels::attention_dropout(Cpu{}, {.y = factors, .x = weights, .dropout = c.dropout()});
  return to_vector<double>(factors);
}

Reference reference(const Case& c, const Triple& x, const Tensor& dout) {
  const std::vector<double> factors = dropout_factors(c);
  const std::vector<double> q = to_vector<double>(x.q), k = to_vector<double>(x.k), v = to_vector<double>(x.v);
  const std::vector<double> g = to_vector<double>(dout);
  const auto queries = static_cast<std::int64_t>(q.size());
  const auto keys = static_cast<std::int64_t>(k.size());
  Reference r{Values(queries), Values(queries), Values(keys), Values(keys), {}};
  for (std::int64_t n = 0; n < c.batches * c.heads; ++n) {
    const std::int64_t key_head = n / c.heads * c.key_heads() + n % c.heads / c.group;
    for (std::int64_t t = 0; t < c.queries; ++t) {
      const std::int64_t row = (n * c.queries + t) * c.depth;
      const double* const factor = &factors[(n * c.queries + t) * c.keys];
      const std::int64_t seen = c.causal ? std::clamp<std::int64_t>(t + c.offset + 1, 0, c.keys) : c.keys;
      std::vector<double> p(seen), dp(seen), dp_size(seen);
      double most = -INFINITY, sum = 0, mean = 0, mean_size = 0;
      for (std::int64_t s = 0; s < seen; ++s) {
        for (std::int64_t d = 0; d < c.depth; ++d) {
          p[s] += c.scale() * q[row + d] * k[(key_head * c.keys + s) * c.depth + d];
        }
        most = std::max(most, p[s]);
      }
      for (double& weight : p) {
        weight = std::exp(weight - most);
        sum += weight;
      }
      r.lse.push_back(seen == 0 ? -INFINITY : most + std::log(sum));
      for (std::int64_t s = 0; s < seen; ++s) {
        p[s] /= sum;
        for (std::int64_t d = 0; d < c.depth; ++d) {
          const std::int64_t key = (key_head * c.keys + s) * c.depth + d;
          const double kept = p[s] * factor[s];
          r.out.add(row + d, kept * v[key], kept * std::abs(v[key]));
          r.dv.add(key, kept * g[row + d], kept * std::abs(g[row + d]));
          dp[s] += factor[s] * g[row + d] * v[key];
          dp_size[s] += factor[s] * std::abs(g[row + d] * v[key]);
        }
        mean += p[s] * dp[s];
        mean_size += p[s] * dp_size[s];
      }
      for (std::int64_t s = 0; s < seen; ++s) {
        const double dscore = c.scale() * p[s] * (dp[s] - mean);
        const double size = c.scale() * p[s] * (dp_size[s] + mean_size);
        for (std::int64_t d = 0; d < c.depth; ++d) {
          const std::int64_t key = (key_head * c.keys + s) * c.depth + d;
          r.dq.add(row + d, dscore * k[key], size * std::abs(k[key]));
          r.dk.add(key, dscore * q[row + d], size * std::abs(q[row + d]));
        }
      }
    }
  }
  return r;
}

void expect_matches(const Case& c) {
  const std::string what = c.text();
  Triple x = triple_of(c);
  for (const Tensor& tensor : {x.q, x.k, x.v}) {
    copy_into(tensor, randn(tensor.shape(), c.dtype, Device::cuda()));
  }
  const Slice dout = slice_of(c, c.heads, c.queries);
  copy_into(dout.view, randn(dout.view.shape(), c.dtype, Device::cuda()));
  if (c.layout == Layout::shared) {
    for (Tensor* const tensor : {&x.k, &x.v}) {
      Strides strides = tensor->strides();
      strides[1] = 0;
      *tensor = as_strided(*tensor, tensor->shape(), strides, kGuard);
    }
  }
  const Reference expected = reference(c, x, dout.view);

  Tensor first[5];
  for (int run = 0; run < 2; ++run) {
    const Slice out = slice_of(c, c.heads, c.queries);
    const Triple gradients = triple_of(c);
    const Tensor lse = full({c.batches, c.heads, c.queries}, kUnwritten, float32, Device::cuda());
    cuda::LaunchRecord record;
    on_gpu([&](auto where) {
      const kernels::FusedAttention forward{.q = x.q,
                                            .k = x.k,
                                            .v = x.v,
                                            .out = out.view,
                                            .lse = lse,
                                            .scale = c.scale(),
                                            .causal = c.causal,
                                            .causal_offset = c.offset,
                                            .dropout = c.dropout()};
      ASSERT_TRUE(kernels::flash_attention_supports(where, forward)) << what;
      kernels::flash_attention_forward(where, forward);
      kernels::flash_attention_backward(where, kernels::FusedAttentionBackward{.q = x.q,
                                                                               .k = x.k,
                                                                               .v = x.v,
                                                                               .out = out.view,
                                                                               .lse = lse,
                                                                               .dout = dout.view,
                                                                               .dq = gradients.q,
                                                                               .dk = gradients.k,
                                                                               .dv = gradients.v,
                                                                               .scale = c.scale(),
                                                                               .causal = c.causal,
                                                                               .causal_offset = c.offset,
                                                                               .dropout = c.dropout()});
    });
    if (gpu_has_wgmma() && !(c.layout == Layout::shared && c.key_heads() > 1)) {
      expect_launched(record, Device::cuda(),
                      {"flash_forward_sm90_kernel", "flash_stats_kernel", "flash_query_gradient_sm90_kernel",
                       "flash_key_gradient_sm90_kernel"},
                      what);
    } else {
      expect_launched(
          record, Device::cuda(),
          {"flash_forward_kernel", "flash_stats_kernel", "flash_query_gradient_kernel", "flash_key_gradient_kernel"},
          what);
    }
    const Tensor results[5] = {out.view, lse, gradients.q, gradients.k, gradients.v};
    if (run == 1) {
      for (int i = 0; i < 5; ++i) {
        expect_same_bits(results[i], first[i], fmt::format("{}: result {} of the second run", what, i));
      }
      return;
    }
    std::copy(std::begin(results), std::end(results), std::begin(first));
    const std::vector<double> sums = to_vector<double>(lse);
    for (std::size_t i = 0; i < sums.size(); ++i) {
      ASSERT_TRUE(sums[i] == expected.lse[i] ||
                  std::abs(sums[i] - expected.lse[i]) <= 1e-5 * (1 + std::abs(expected.lse[i])))
          << what << ": lse " << i << " is " << sums[i] << ", expected " << expected.lse[i];
    }
    const double tolerance = epsilon_of(c.dtype);
    const auto compare = [&](const Tensor& got, const Values& values, const char* name) {
      expect_rows_close(got, values.exact, values.sizes, 1, tolerance, what + ": " + name);
    };
    compare(out.view, expected.out, "out");
    compare(gradients.q, expected.dq, "dq");
    compare(gradients.k, expected.dk, "dk");
    compare(gradients.v, expected.dv, "dv");
    expect_untouched(out.buffer, {out.view}, what + ": out");
    if (c.layout == Layout::packed) {
      expect_untouched(gradients.buffer[0], {gradients.q, gradients.k, gradients.v}, what + ": gradients");
    } else {
      expect_untouched(gradients.buffer[0], {gradients.q}, what + ": dq");
      expect_untouched(gradients.buffer[1], {gradients.k}, what + ": dk");
      expect_untouched(gradients.buffer[2], {gradients.v}, what + ": dv");
    }
    if (testing::Test::HasFailure()) {
      return;
    }
  }
}

constexpr std::int64_t kSizes[] = {1, 7, 63, 64, 65, 127, 128, 129, 300};
constexpr std::int64_t kDepths[] = {64, 128, 32, 40, 80, 96, 8};
constexpr std::int64_t kGroups[] = {1, 2, 4};
constexpr Layout kLayouts[] = {Layout::dense, Layout::packed, Layout::apart, Layout::shared};

class FlashAttentionSizes : public testing::TestWithParam<std::int64_t> {};  // queries

// For each number of queries, all combinations of keys and causal masks. The other parameters alternate.
TEST_P(FlashAttentionSizes, MatchTheDefinition) {
  if (!cuda_available()) {
    GTEST_SKIP() << "no GPU";
  }
  manual_seed(15);
  const std::int64_t queries = GetParam();
  std::size_t turn = static_cast<std::size_t>(queries);
  for (const std::int64_t keys : kSizes) {
    // No causal mask; first query and first key aligned; last ones aligned; some queries that see no key.
    for (const std::int64_t offset : {keys, std::int64_t{0}, keys - queries, -queries / 2}) {
      const Layout layout = kLayouts[turn % 4];
      expect_matches({.dtype = turn % 3 == 0 ? float16 : bfloat16,
                      .batches = turn % 5 == 0 ? 2 : 1,
                      .heads = 4,
                      .group = kGroups[turn / 2 % 3],
                      .queries = queries,
                      .keys = keys,
                      .depth = kDepths[turn % 7],
                      .causal = offset != keys,
                      .offset = offset,
                      .layout = layout == Layout::packed && queries != keys ? Layout::apart : layout,
                      .dropout_p = turn % 9 % 2 == 0 ? 0 : 0.3});
      ++turn;
      if (HasFailure()) {
        return;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, FlashAttentionSizes, testing::ValuesIn(kSizes));

// Each head size with each kernel, with packed tensors and more tiles than multiprocessors.
TEST(FlashAttention, EveryHeadSize) {
  if (!cuda_available()) {
    GTEST_SKIP() << "no GPU";
  }
  manual_seed(16);
  for (const std::int64_t depth : kDepths) {
    for (const DType dtype : {float16, bfloat16}) {
      for (const Layout layout : {Layout::packed, Layout::shared}) {
        for (const double dropout : {0.0, 0.15}) {
          expect_matches({.dtype = dtype,
                          .batches = 3,
                          .heads = 4,
                          .group = 2,
                          .queries = 161,
                          .keys = 161,
                          .depth = depth,
                          .causal = true,
                          .offset = 0,
                          .layout = layout,
                          .dropout_p = dropout});
          if (HasFailure()) {
            return;
          }
        }
      }
    }
  }
}

TEST(FlashAttention, RefusesWhatItCannotDo) {
  if (!cuda_available()) {
    GTEST_SKIP() << "no GPU";
  }
  on_gpu([](auto where) {
    const auto supports = [&](std::int64_t depth, DType dtype, std::int64_t row, double scale, std::int64_t key_heads) {
      const auto tensor = [&](std::int64_t heads) {
        const Tensor buffer = zeros({heads * 10 * row}, dtype, Device::cuda());
        return as_strided(buffer, {1, heads, 10, depth}, {heads * 10 * row, 10 * row, row, 1}, 0);
      };
      return kernels::flash_attention_supports(where, kernels::FusedAttention{.q = tensor(6),
                                                                              .k = tensor(key_heads),
                                                                              .v = tensor(key_heads),
                                                                              .out = tensor(6),
                                                                              .lse = {},
                                                                              .scale = scale});
    };
    EXPECT_TRUE(supports(64, float16, 64, 0.125, 6));
    EXPECT_TRUE(supports(64, bfloat16, 72, 0.125, 2));
    EXPECT_FALSE(supports(64, float32, 64, 0.125, 6));
    EXPECT_FALSE(supports(64, float16, 68, 0.125, 6)) << "rows are not aligned to 16 bytes";
    EXPECT_FALSE(supports(60, float16, 64, 0.125, 6)) << "rows do not end at 16 bytes";
    EXPECT_FALSE(supports(136, float16, 136, 0.125, 6));
    EXPECT_FALSE(supports(64, float16, 64, 0.125, 4)) << "4 does not divide 6";
    EXPECT_FALSE(supports(64, float16, 64, -1, 6));
    EXPECT_FALSE(supports(64, float16, 64, NAN, 6));
  });
}

}  // namespace flash_attention_test

#include <gtest/gtest.h>

#include <cstring>

#include "tests/ops/attention_reference.h"
#include <mica/autograd/grad.h>
#include <mica/autograd/gradcheck.h>
#include <mica/core/copy.h>
#include <mica/core/parallel.h>
#include <mica/ops/attention/attention.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/elementwise/where.h>
#include <mica/ops/join/join.h>
#include <mica/ops/matmul/matmul.h>
#include <mica/ops/softmax/softmax.h>
#include <mica/ops/tril/tril.h>
#include <mica/ops/view/view.h>

using namespace mica;

namespace attention_test {

using namespace mica::attention_testing;

// The error relative to the size of the terms, for results that are computed in at least float32 and rounded once.
double tolerance_of(DType dtype) { return dtype == float64 ? 1e-12 : 2e-5; }

struct Sizes {
  std::int64_t queries, keys, width, values;
};

TEST(Attention, MatchesDefinition) {
  // Rows of one element, rows shorter and longer than a packet or a warp, and rows for each CUDA kernel.
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

// A window is the same as a mask.
TEST(Attention, Window) {
  struct Case {
    std::int64_t queries, keys, offset, window;
  };
  for (const Device device : test_devices()) {
    for (const auto& [queries, keys, offset, window] :
         {Case{9, 9, 0, 4}, Case{9, 9, 0, 9}, Case{200, 200, 0, 1}, Case{200, 200, 0, 70}, Case{1, 90, 89, 7},
          Case{150, 330, 180, 100}, Case{150, 100, 20, 30}, Case{140, 60, -70, 10}, Case{128, 128, 0, 40},
          Case{64, 192, 128, 50}}) {
      for (const DType dtype : {float64, bfloat16}) {
        for (const int mask_kind : {0, 1, 2, 3}) {  // none, boolean, of keys only, floating
          const std::string what = fmt::format("{} {} keys {} offset {} window {} mask {} {} {}", queries, keys, keys,
                                               offset, window, mask_kind, dtype, device);
          const auto draw = [&, d = dtype](std::int64_t heads, std::int64_t rows) {
            return randn({2, heads, rows, 32}, d, device).requires_grad_();
          };
          const Tensor q = draw(2, queries), k = draw(1, keys), v = draw(1, keys);
          const Tensor dy = randn(q.shape(), dtype, device);
          const Tensor distance = arange(static_cast<double>(keys), int64, device) -
                                  unsqueeze(arange(static_cast<double>(queries), int64, device), 1) - offset;
          Tensor mask, with_window = logical_and(le(distance, 0), gt(distance, -window));
          if (mask_kind == 1 || mask_kind == 2) {
            mask = gt(rand(mask_kind == 1 ? Shape{queries, keys} : Shape{2, 1, 1, keys}, float32, device), 0.3);
            with_window = logical_and(mask, with_window);
          } else if (mask_kind == 3) {
            mask = randn({queries, keys}, dtype, device);
            with_window = where(with_window, mask, -INFINITY);
          }
          const auto run = [&](const AttentionOptions& options) {
            Tensors results{scaled_dot_product_attention(q, k, v, options)};
            const auto add_gradients = [&](const Tensor& y, autograd::GradOptions kind) {
              for (const Tensor& gradient : autograd::grad({y}, {q, k, v}, {dy}, kind)) {
                results.push_back(gradient);
              }
            };
            add_gradients(results[0], {.retain_graph = true});
            add_gradients(autograd::grad({results[0]}, {q}, {dy}, {.create_graph = true})[0], {});
            return results;
          };
          const Tensors got = run({.causal = true, .causal_offset = offset, .window = window, .mask = mask});
          const Tensors expected = run({.mask = with_window, .backend = AttentionBackend::composed});
          const double tolerance = dtype == float64 ? 1e-12 : 0.05;
          for (std::size_t i = 0; i < got.size(); ++i) {
            expect_close(got[i], expected[i], tolerance, tolerance, what);
          }
        }
      }
    }
    const Tensor qkv = randn({2, 100, 48}, float64, device);
    const Tensor y = self_attention(qkv, 2, {.causal = true, .window = 5});
    const auto part = [&](std::int64_t i) {
      return transpose(reshape(slice(qkv, 2, 16 * i, 16 * i + 16), {2, 100, 2, 8}), 1, 2);
    };
    const Tensor z = scaled_dot_product_attention(part(0), part(1), part(2), {.causal = true, .window = 5});
    expect_close(y, reshape(transpose(z, 1, 2), {2, 100, 16}), 1e-12, 1e-12);
    expect_error([&] { self_attention(qkv, 2, {.window = 5}); }, "with a window `causal`, got 5 and false");
    expect_error([&] { self_attention(qkv, 2, {.causal = true, .window = -1}); }, "expected a window >= 0");
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

// The scores are so large that rounding them to 16 bits would show.
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
        const double tolerance = tolerance_of(dtype) * sigma * sigma;  // the error of float32 grows with the scores
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

TEST(Attention, CappedScores) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, float16, bfloat16}) {
      for (const double cap : {0.4, 30.0}) {
        const DType exact = dtype == float64 ? float64 : float32;
        const auto input = [&](std::int64_t heads, std::int64_t rows) {
          return randn({2, heads, rows, 32}, dtype, device).requires_grad_();
        };
        const Tensor q = input(4, 6), k = input(2, 9), v = input(2, 9);
        const Tensor mask = logical_or(rand({2, 1, 6, 9}, float32, device) < 0.6, arange(9, int64, device) < 1);
        const Tensor dy = randn({2, 4, 6, 32}, dtype, device);
        const Tensor y = scaled_dot_product_attention(
            q, k, v, {.causal = true, .causal_offset = 3, .scale = 0.5, .cap = cap, .mask = mask});
        y.backward(dy);
        // The same by ops, with a head of keys for each head of queries.
        const auto copied = [&](const Tensor& x) { return x.detach().to(exact).requires_grad_(); };
        const Tensor q2 = copied(q), k2 = copied(k), v2 = copied(v);
        const auto spread = [](const Tensor& x) { return reshape(stack({x, x}, 2), {2, 4, 9, 32}); };
        const Tensor scores = tanh(matmul(q2, transpose(spread(k2), 2, 3)) * 0.5 / cap) * cap;
        const Tensor seen = logical_and(mask, ne(tril(ones({6, 9}, float32, device), 3), 0));
        const Tensor expected = matmul(softmax(where(seen, scores, -INFINITY), -1), spread(v2));
        expected.backward(dy.to(exact));
        const bool is_16_bit = dtype == float16 || dtype == bfloat16;
        const double tolerance = dtype == float64 ? 1e-12 : is_16_bit ? 2e-2 : 1e-5;
        const std::string what = fmt::format("{} on {}, cap {}", dtype, device, cap);
        expect_close(y, expected, tolerance, tolerance, what);
        expect_close(q.grad(), q2.grad(), tolerance, tolerance, what + " dq");
        expect_close(k.grad(), k2.grad(), tolerance, tolerance, what + " dk");
        expect_close(v.grad(), v2.grad(), tolerance, tolerance, what + " dv");
      }
    }
    const Tensors inputs{randn({1, 2, 3, 2}, float64, device), randn({1, 1, 4, 2}, float64, device),
                         randn({1, 1, 4, 2}, float64, device)};
    const auto capped = [](const Tensor& q, const Tensor& k, const Tensor& v) {
      return scaled_dot_product_attention(q, k, v, {.causal = true, .causal_offset = 1, .scale = -2, .cap = 0.7});
    };
    EXPECT_TRUE(autograd::gradcheck(capped, inputs));
    EXPECT_TRUE(autograd::gradgradcheck(capped, inputs));
  }
}

TEST(Attention, RowsThatSeeNothingAreZeros) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float64, float32, float16, bfloat16}) {
      for (const std::int64_t keys : {5, 100, 2000}) {  // for each CUDA kernel
        // On CUDA, 16-bit tensors of the second shape use the fused kernel.
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
    // Values of another width than keys, shared key heads, and more keys than a block has.
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

TEST(Attention, OptionErrors) {
  const Tensor x = ones({2, 4, 3, 8});
  const auto attention = [&](const AttentionOptions& options) { scaled_dot_product_attention(x, x, x, options); };
  expect_error([&] { attention({.mask = ones({3, 3}, int64)}); }, "expected a boolean or floating mask, got int64");
  expect_error([&] { attention({.mask = ones({3, 2})}); }, "expected a mask that broadcasts to the scores' shape");
  expect_error([&] { attention({.mask = ones({1, 2, 4, 3, 3})}); }, "[2, 4, 3, 3], got [1, 2, 4, 3, 3]");
  expect_error([&] { attention({.causal_offset = 4}); }, "expected causal_offset in [-3, 3]");
  expect_error([&] { attention({.causal_offset = INT64_MIN}); }, "expected causal_offset in [-3, 3]");
  expect_error([&] { attention({.cap = -1}); }, "expected a finite cap >= 0, got -1");
  expect_error([&] { attention({.cap = 1, .backend = AttentionBackend::blocked}); },
               "the blocked backend does not support q [2, 4, 3, 8]");
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

}  // namespace attention_test

#include <tests/nn/support.h>
#include <tests/rows_close.h>

#include <mica/core/rng.h>
#include <mica/nn/transformer.h>
#include <mica/ops/elementwise/binary.h>

using namespace mica;
using namespace mica::testing_support;

namespace {

using Names = std::vector<std::string>;
using Values = std::vector<double>;

/// Rows of x (rows, in) times weightᵀ plus bias.
Values linear_reference(const Values& x, const nn::Linear& layer) {
  const Values w = to_vector<double>(layer.weight), b = to_vector<double>(layer.bias);
  const std::size_t out = b.size(), in = w.size() / out, rows = x.size() / in;
  Values y;
  for (std::size_t r = 0; r < rows; ++r) {
    for (std::size_t o = 0; o < out; ++o) {
      double sum = b[o];
      for (std::size_t i = 0; i < in; ++i) {
        sum += x[r * in + i] * w[o * in + i];
      }
      y.push_back(sum);
    }
  }
  return y;
}

TEST(MultiheadAttention, MatchesReference) {
  constexpr int kBatch = 2, kLength = 5, kHeads = 3, kSize = 2, kWidth = kHeads * kSize;
  for (const bool causal : {true, false}) {
    manual_seed(1);
    nn::MultiheadAttention attention{kWidth, {.heads = kHeads, .causal = causal}};
    attention.to(float64);
    const Tensor x = randn({kBatch, kLength, kWidth}, float64);
    const Values qkv = linear_reference(to_vector<double>(x), attention.c_attn);
    const auto at = [&](int b, int t, int part, int head, int i) {
      return qkv[(b * kLength + t) * 3 * kWidth + part * kWidth + head * kSize + i];
    };
    Values mixed(kBatch * kLength * kWidth);
    for (int b = 0; b < kBatch; ++b) {
      for (int head = 0; head < kHeads; ++head) {
        for (int t = 0; t < kLength; ++t) {
          const int seen = causal ? t + 1 : kLength;
          Values weight(seen);
          double total = 0;
          for (int s = 0; s < seen; ++s) {
            double score = 0;
            for (int i = 0; i < kSize; ++i) {
              score += at(b, t, 0, head, i) * at(b, s, 1, head, i);
            }
            weight[s] = std::exp(score / std::sqrt(double{kSize}));
            total += weight[s];
          }
          for (int s = 0; s < seen; ++s) {
            for (int i = 0; i < kSize; ++i) {
              mixed[(b * kLength + t) * kWidth + head * kSize + i] += weight[s] / total * at(b, s, 2, head, i);
            }
          }
        }
      }
    }
    expect_close(attention(x), linear_reference(mixed, attention.c_proj), 1e-10, 1e-12);
  }
}

TEST(MultiheadAttention, NamesGradientsAndErrors) {
  manual_seed(2);
  nn::MultiheadAttention attention{4, {.heads = 2}};
  EXPECT_EQ(names_of(attention.named_parameters()),
            (Names{"c_attn.weight", "c_attn.bias", "c_proj.weight", "c_proj.bias"}));
  check_gradients(attention, randn({2, 3, 4}));
  compare_devices(attention, randn({2, 3, 4}));
  expect_error([] { nn::MultiheadAttention(10, {.heads = 3}); },
               "MultiheadAttention: expected heads to divide width, got width 10 and heads 3");
  expect_error([] { nn::MultiheadAttention(10, {.heads = 0}); }, "heads to divide width");
  expect_error([&] { attention(ones({2, 3, 5})); }, "MultiheadAttention: expected (B, T, 4), got [2, 3, 5]");
  EXPECT_EQ(attention(zeros({0, 3, 4}, float64)).shape(), (Shape{0, 3, 4}));
}

TEST(MultiheadAttention, DropoutOnlyInTraining) {
  manual_seed(3);
  nn::MultiheadAttention attention{4, {.heads = 2, .dropout = 0.5}};
  const Tensor x = randn({2, 6, 4});
  EXPECT_NE(to_vector<float>(attention(x)), to_vector<float>(attention(x)));
  attention.eval();
  EXPECT_EQ(to_vector<float>(attention(x)), to_vector<float>(attention(x)));
}

TEST(TransformerBlock, NamesGradientsAndOptions) {
  manual_seed(4);
  nn::TransformerBlock block{4, {.heads = 2}};
  EXPECT_EQ(names_of(block.named_parameters()),
            (Names{"ln_1.weight", "ln_1.bias", "attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight",
                   "attn.c_proj.bias", "ln_2.weight", "ln_2.bias", "mlp.c_fc.weight", "mlp.c_fc.bias",
                   "mlp.c_proj.weight", "mlp.c_proj.bias"}));
  check_gradients(block, randn({2, 3, 4}));
  compare_devices(block, randn({2, 3, 4}));
  nn::TransformerBlock no_bias{4, {.heads = 1, .causal = false, .bias = false, .gelu = GeluApproximation::none}};
  EXPECT_EQ(names_of(no_bias.named_parameters()), (Names{"ln_1.weight", "attn.c_attn.weight", "attn.c_proj.weight",
                                                         "ln_2.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"}));
  check_gradients(no_bias, randn({1, 3, 4}));
}

TEST(TransformerBlock, AddsTheBranchOfTheBlockBefore) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float32, bfloat16}) {
      manual_seed(6);
      nn::TransformerBlock block{16, {.heads = 2}};
      block.to(device, dtype);
      const Tensor residual = randn({2, 3, 16}, dtype, device), branch = randn({2, 3, 16}, dtype, device);
      const Tensor bias = block.mlp.c_proj.bias.detach();
      const auto [sum, unbiased] = block(residual, branch, bias);
      const Tensor last = unbiased + bias;
      const Tensor expected = block(residual + (branch + bias));
      // The norms differ by rounding. The branches after them are at most 0.3, so they differ by less than the spacing
      // of the sums, which are rounded twice. Adding a bias later rounds a branch once more.
      const double eps = epsilon_of(dtype);
      expect_close(sum + last, expected, 2 * eps, eps / 2);
    }
  }
}

// The norms drop the same elements as their modules' dropouts.
TEST(TransformerBlock, DropsInItsNorms) {
  for (const Device device : test_devices()) {
    nn::TransformerBlock block{16, {.heads = 2, .dropout = 0.4}};
    block.to(device);
    const Tensor residual = randn({2, 3, 16}, float32, device), branch = randn({2, 3, 16}, float32, device);
    for (const bool training : {true, false}) {
      block.train(training);
      manual_seed(9);
      const auto [sum, last] = block(residual, branch);
      manual_seed(9);
      const Tensor x = residual + block.mlp.dropout(branch);
      const Tensor y = x + block.attn(block.ln_1(x));
      expect_close(sum, y, 1e-5, 1e-5, "sum");
      expect_close(last, block.mlp.branch(block.ln_2(y)), 1e-5, 1e-5, "branch");
      manual_seed(9);
      const Tensor whole = block(residual);
      manual_seed(9);
      const Tensor attended = residual + block.attn(block.ln_1(residual));
      expect_close(whole, attended + block.mlp(block.ln_2(attended)), 1e-5, 1e-5, "the block by itself");
    }
  }
}

TEST(TransformerBlock, ResidualsPassThrough) {
  manual_seed(5);
  nn::TransformerBlock block{4, {.heads = 2}};
  StateDict state = block.state_dict();
  for (const char* name : {"attn.c_proj.weight", "attn.c_proj.bias", "mlp.c_proj.weight", "mlp.c_proj.bias"}) {
    state[name] = zeros(state[name].shape());
  }
  block.load_state_dict(state);
  const Tensor x = randn({2, 3, 4});
  expect_close(block(x), x, 0, 0);
}

}  // namespace

#include <gtest/gtest.h>

#include "tests/depth.h"
#include "tests/launches.h"
#include "tests/ops/attention_reference.h"
#include <mica/autograd/grad.h>
#include <mica/core/copy.h>
#include <mica/core/rng.h>
#include <mica/ops/attention/attention.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/compare.h>
#include <mica/ops/elementwise/where.h>
#include <mica/ops/view/view.h>

using namespace mica;

namespace attention_fused_test {

using namespace mica::attention_testing;

// Tests all available kernels on problems that they support: they must match the definition, repeat the same bits, and
// support strided operands and second derivatives (by composed attention).
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
  OneIn five(5);
  for (const Device device : test_devices()) {
    for (const AttentionBackend backend :
         {AttentionBackend::blocked, AttentionBackend::flash, AttentionBackend::cudnn}) {
      for (const DType dtype : {bfloat16, float16}) {
        for (const FusedCase& c : fused_cases()) {
          if (!takes(backend, c, dtype, device) || five.skips()) {
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
          // Weights and gradients of scores are rounded to 16 bits for the tensor cores. Near 0, the spacing of float16
          // is 2⁻²⁴.
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

TEST(Attention, FusedKernelsTakeMasks) {
  if (!cuda_available()) {
    GTEST_SKIP() << "no GPU";
  }
  const Device device = Device::cuda();
  const std::int64_t batch = 2, heads = 4, queries = 77, keys = 130;
  const std::vector<Shape> shapes{
      {batch, 1, 1, keys}, {queries, keys}, {batch, heads, queries, keys}, {1, heads, queries, 1}};
  std::size_t turn = 0;
  for (const DType dtype : {bfloat16, float16}) {
    for (const std::int64_t width : {32, 64, 80, 128}) {
      for (const DType mask_dtype : {boolean, float32, dtype}) {
        const Shape shape = shapes[turn % shapes.size()];
        const std::int64_t key_heads = turn / 4 % 2 == 0 ? 4 : 2;
        const bool causal = turn % 5 < 2;
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
                                              // Below 2⁻¹⁴, the spacing of float16 no longer decreases.
                                              .least = dtype == float16 ? 0x1p-14 : 0});
        expect_sums(y, expected.y, share, what + " y");
        expect_sums(q.grad(), expected.dq, share, what + " dq");
        expect_sums(k.grad(), expected.dk, share, what + " dk");
        expect_sums(v.grad(), expected.dv, share, what + " dv");
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
    // The tolerance is relative to the whole tensor: if a query sees a single key, its gradient is 0 or a rounding
    // error. A score's gradient is the difference of two sums of 64 terms of about 1.4, each rounded to 8 bits. That
    // makes an error of 11 · 2⁻⁸ times an element of the keys times the scale of 1/8, and the largest of 69,120 errors
    // is four times as large.
    expect_rows_close(got[i], to_vector<double>(wanted[i]), wanted[i].numel(), 5e-2, fmt::format("result {}", i));
  }
}

}  // namespace attention_fused_test

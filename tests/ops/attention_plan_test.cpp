#include <gtest/gtest.h>

#include <vector>

#include <mica/ops/attention/detail/attention_plan.h>

using namespace mica;

namespace attention_plan_test {

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
  // cuDNN comes first for wide heads and on GPUs without wgmma, unless lengths vary or its workspace is large.
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
  const std::vector only_cudnn{cudnn, composed};
  EXPECT_EQ(with([](auto& p) { p.windowed = true; }), only_cudnn);
  EXPECT_EQ(with([](auto& p) { p.windowed = true, p.items = 2048; }), only_cudnn);
  EXPECT_EQ(with([](auto& p) { p.windowed = true, p.items = 2049; }), only_composed);
  EXPECT_EQ(with([](auto& p) { p.windowed = true, p.keys = 1000; }), only_composed);
  EXPECT_EQ(with([](auto& p) { p.windowed = p.masked = true; }), only_composed);
  EXPECT_EQ(with([](auto& p) { p.windowed = p.drops = true; }), only_composed);
  EXPECT_EQ(with([](auto& p) { p.composed_only = true; }), only_composed);
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

}  // namespace attention_plan_test

#include <tests/support.h>

#include <mica/core/copy.h>
#include <mica/core/rng.h>
#include <mica/distributed/sharded_adamw.h>
#include <mica/optim/grad_scaler.h>

namespace mica::distributed {
namespace {

using testing_support::expect_close;
using testing_support::expect_error;
using testing_support::test_devices;

// Several ranks are tested in tests/ranks/.

TEST(ShardedAdamW, OfOneRankIsAdamW) {
  for (const Device device : test_devices()) {
    for (const DType dtype : {float32, bfloat16, float64}) {
      Tensors parameters, expected;
      for (Tensors* const to : {&parameters, &expected}) {
        manual_seed(1);
        for (const Shape& shape : {Shape{40'000}, Shape{3, 5}, Shape{}, Shape{0}, Shape{2}}) {
          to->push_back(randn(shape, dtype, device).requires_grad_());
        }
      }
      const Storage* const memory = parameters[0].handle()->storage.get();
      const optim::AdamWOptions options{.lr = 0.01, .weight_decay = 0.1};
      ShardedAdamW sharded(optim::AdamW::decay_matrices(parameters, options), Group(), {.bucket_bytes = 100});
      optim::AdamW adamw(optim::AdamW::decay_matrices(expected, options));
      EXPECT_EQ(parameters[0].handle()->storage.get(), memory) << "weights are not moved";
      EXPECT_EQ(sharded.group_count(), 2u);
      optim::GradScaler scaler({.init_scale = 4}), other({.init_scale = 4});
      for (int step = 0; step < 5; ++step) {
        manual_seed(static_cast<std::uint64_t>(10 + step));
        for (std::size_t i = 0; i + 1 < parameters.size(); ++i) {
          parameters[i].set_grad(randn(parameters[i].shape(), dtype, device));
          expected[i].set_grad(parameters[i].grad());
        }
        sharded.set_lr(1, 0.1 / (step + 1));
        adamw.set_lr(1, 0.1 / (step + 1));
        const Tensor norm = sharded.step({.max_grad_norm = 3, .scaler = &scaler});
        EXPECT_EQ(norm.item(), adamw.step({.max_grad_norm = 3, .scaler = &other}).item());
        for (std::size_t i = 0; i < parameters.size(); ++i) {
          expect_close(parameters[i].detach(), expected[i].detach(), 0, 0);
        }
      }
      EXPECT_EQ(sharded.lr(1), 0.02);
      const StateDict state = sharded.state_dict(), from_adamw = adamw.state_dict();
      ASSERT_EQ(state.size(), from_adamw.size());
      std::size_t bytes = 0;
      for (const auto& [name, tensor] : from_adamw) {
        expect_close(state.at(name), tensor, 0, 0, name);
        bytes += name.ends_with("step") ? 0 : tensor.bytes();
      }
      EXPECT_EQ(sharded.state_bytes(), bytes);
      ShardedAdamW again(sharded.parameters().size() == 5 ? sharded.parameters() : Tensors{}, options, Group());
      again.load_state_dict(from_adamw);
      EXPECT_EQ(again.state_dict().size(), from_adamw.size());
      sharded.zero_grad();
      EXPECT_FALSE(parameters[0].grad().defined());
    }
  }
}

TEST(ShardedAdamW, RefusesWhatAdamWRefuses) {
  const Tensor x = ones({3}).requires_grad_();
  const Group one;
  expect_error([&] { ShardedAdamW(Tensors{}, {}, one); }, "ShardedAdamW: expected at least one parameter");
  expect_error([&] { ShardedAdamW({Tensor{}}, {}, one); }, "expected a defined tensor");
  expect_error([&] { ShardedAdamW({x, x}, {}, one); }, "ShardedAdamW: a parameter of shape [3] was given twice");
  expect_error([&] { ShardedAdamW({ones({3})}, {}, one); }, "ShardedAdamW: expected parameters to be leaves");
  expect_error([&] { ShardedAdamW({x}, {.lr = -1}, one); }, "ShardedAdamW: expected lr >= 0, got -1");
  expect_error([&] { ShardedAdamW({x}, {.betas = {0.9, 1}}, one); }, "ShardedAdamW: expected betas in [0, 1)");
  expect_error([&] { ShardedAdamW({x}, {}, one, {.bucket_bytes = 0}); },
               "ShardedAdamW: expected bucket_bytes > 0, got 0");
  expect_error([&] { ShardedAdamW({x}, {}, one, {.reduce_dtype = bfloat16}); },
               "ShardedAdamW: expected reduce_dtype to be float32 or float64, got bfloat16");
  ShardedAdamW optimizer({x}, {}, one);
  expect_error([&] { optimizer.step({.max_grad_norm = -1}); }, "ShardedAdamW: expected max_grad_norm >= 0, got -1");
  expect_error([&] { optimizer.set_lr(2, 0.1); }, "ShardedAdamW: group 2 is out of range for 1 groups");
  expect_error([&] { optimizer.set_lr(-0.1); }, "ShardedAdamW: expected lr >= 0, got -0.1");
  expect_error([&] { optimizer.state_dict(1); }, "ShardedAdamW: state_dict: expected a rank in [0, 1), got 1");
  expect_error(
      [&] {
        optimizer.load_state_dict({{"state.0.momentum", ones({3})}});
      },
      "ShardedAdamW: load_state_dict: \"state.0.momentum\" is unexpected");
}

}  // namespace
}  // namespace mica::distributed

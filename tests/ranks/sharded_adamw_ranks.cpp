#include <tests/ranks/rank_device.h>
#include <tests/support.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include <mica/autograd/grad_mode.h>
#include <mica/core/copy.h>
#include <mica/core/rng.h>
#include <mica/distributed/sharded_adamw.h>
#include <mica/nn/linear.h>
#include <mica/ops/elementwise/binary.h>
#include <mica/ops/elementwise/unary.h>
#include <mica/ops/reduce/reduce.h>
#include <mica/ops/view/view.h>
#include <mica/optim/clip_grad.h>
#include <mica/optim/ema.h>
#include <mica/optim/grad_scaler.h>

namespace mica::distributed {
namespace {

using testing_support::expect_error;

std::vector<double> values(const Tensor& x) { return to_vector<double>(x); }

// Parameters of odd sizes in three dtypes, some smaller than the number of ranks and some larger than a bucket. The
// values depend on the seed alone.
Tensors some_parameters(std::uint64_t seed = 1) {
  manual_seed(seed);
  Tensors result;
  for (const DType dtype : {float32, bfloat16, float64, float16}) {
    for (const Shape& shape : {Shape{1}, Shape{3}, Shape{2, 3}, Shape{0}, Shape{}, Shape{257}, Shape{71, 31}}) {
      result.push_back(here(randn(shape, dtype)).requires_grad_());
    }
  }
  return result;
}

Tensors copies_of(const Tensors& parameters) {
  Tensors result;
  for (const Tensor& x : parameters) {
    const Tensor copy = empty(x.shape(), x.dtype(), x.device());
    copy_into(copy, x.detach());
    result.push_back(copy.requires_grad_());
  }
  return result;
}

// What rank `rank` contributes to the mean gradient of parameter i: whole numbers, so that any order of summation gives
// the same. For up to 4 ranks, the sum is at most 128, and exact even in bfloat16.
Tensor part_of(const Tensor& x, std::size_t i, int rank, int step) {
  std::vector<double> data;
  for (std::int64_t k = 0; k < x.numel(); ++k) {
    data.push_back(static_cast<double>((k * 7 + rank * 5 + step * 3 + static_cast<std::int64_t>(i) * 11) % 17 - 8));
  }
  return from_data(data, x.shape(), x.device());
}

// Sets the gradients of this rank, whose mean is the sum of part_of(ranks).
void set_gradients(
    const Tensors& parameters, int step, const Group& group,
    const std::function<bool(std::size_t, int)>& has = [](std::size_t, int) { return true; }) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const Tensor& x = parameters[i];
    x.set_grad({});
    if (has(i, group.rank())) {
      x.set_grad((part_of(x, i, group.rank(), step) * group.size()).to(x.dtype()));
    }
  }
}

// The same by a backward pass.
void run_backward(
    const Tensors& parameters, int step, const Group& group,
    const std::function<bool(std::size_t, int)>& has = [](std::size_t, int) { return true; }) {
  Tensor loss;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (has(i, group.rank())) {
      const Tensor& x = parameters[i];
      const Tensor factor = (part_of(x, i, group.rank(), step) * group.size()).to(x.dtype());
      const Tensor term = sum(x * factor).to(float64);
      loss = loss.defined() ? loss + term : term;
    }
  }
  loss.backward();
}

// Sets the gradients to the mean itself.
void set_means(
    const Tensors& parameters, int step, int ranks,
    const std::function<bool(std::size_t, int)>& has = [](std::size_t, int) { return true; }) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const Tensor& x = parameters[i];
    Tensor mean;
    for (int rank = 0; rank < ranks; ++rank) {
      if (has(i, rank)) {
        const Tensor part = part_of(x, i, rank, step);
        mean = mean.defined() ? mean + part : part;
      }
    }
    x.set_grad(mean.defined() ? mean.to(x.dtype()) : Tensor{});
  }
}

void expect_same(const Tensors& got, const Tensors& expected, const std::string& what) {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(values(got[i]), values(expected[i])) << what << ", parameter " << i;
  }
}

void expect_same(const StateDict& got, const StateDict& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (const auto& [name, tensor] : expected) {
    ASSERT_TRUE(got.contains(name)) << name;
    const Tensor& other = got.at(name);
    ASSERT_EQ(other.shape(), tensor.shape()) << name;
    ASSERT_EQ(other.dtype(), tensor.dtype()) << name;
    ASSERT_EQ(values(other), values(tensor)) << name;
  }
}

constexpr optim::AdamWOptions kOptions{.lr = 0.01, .weight_decay = 0.1};
constexpr ShardingOptions kSharding{.bucket_bytes = 4096};

TEST(ShardedAdamWOfRanks, IsAdamWOfTheMeanGradients) {
  const Group group = world();
  const int last = group.size() - 1;
  // Parameter 2 never has a gradient, 5 has one on one rank only, 6 in odd steps, and 13 in the third step on another
  // rank.
  const auto has_at = [&](int step) {
    return [=](std::size_t i, int rank) {
      return i != 2 && (i != 5 || rank == last) && (i != 6 || step % 2 == 1) &&
             (i != 13 || (step == 3 && rank == step % (last + 1)));
    };
  };
  for (const auto& [clip, overlap, overlap_gather] : {std::tuple{0.0, false, false},
                                                      {0.0, false, true},
                                                      {25.0, false, false},
                                                      {25.0, true, false},
                                                      {25.0, true, true},
                                                      {std::numeric_limits<double>::infinity(), true, true}}) {
    const Tensors parameters = some_parameters(1 + static_cast<std::uint64_t>(group.rank()));  // become those of rank 0
    const Tensors expected = some_parameters(1);
    ShardedAdamW sharded(
        optim::AdamW::decay_matrices(parameters, kOptions), group,
        {.bucket_bytes = kSharding.bucket_bytes, .overlap = overlap, .overlap_gather = overlap_gather});
    optim::AdamW adamw(optim::AdamW::decay_matrices(expected, kOptions));
    expect_same(parameters, expected, "at the start");
    optim::StepOptions options;
    if (clip > 0) {
      options.max_grad_norm = clip;
    }
    for (int step = 0; step < 20; ++step) {
      sharded.set_lr(0, 0.01 + 0.001 * step);
      adamw.set_lr(0, 0.01 + 0.001 * step);
      sharded.zero_grad();
      if (overlap && step % 5 != 4) {
        run_backward(parameters, step, group, has_at(step));
      } else {
        set_gradients(parameters, step, group, has_at(step));
      }
      set_means(expected, step, group.size(), has_at(step));
      const Tensor norm = sharded.step(options), expected_norm = adamw.step(options);
      ASSERT_EQ(norm.defined(), clip > 0);
      if (clip > 0) {
        // Sums of squares of whole numbers are exact.
        ASSERT_EQ(norm.item(), expected_norm.item());
        ASSERT_GT(norm.item(), 25.0);
      }
      expect_same(parameters, expected,
                  fmt::format("clip {}, overlap {} and {}, step {}", clip, overlap, overlap_gather, step));
      ASSERT_EQ(parameters[0].grad().defined(), !overlap || group.size() == 1);
    }
    expect_same(sharded.state_dict(), adamw.state_dict());
    sharded.zero_grad();
    adamw.zero_grad();
    EXPECT_FALSE(parameters[0].grad().defined());
    EXPECT_EQ(sharded.step({.max_grad_norm = 1}).item(), 0);
    EXPECT_FALSE(sharded.step().defined());
    expect_same(parameters, expected, "without gradients");
  }
}

TEST(ShardedAdamWOfRanks, ReducesDuringBackward) {
  const Group group = world();
  const bool several = group.size() > 1;
  const Tensors parameters = some_parameters(), expected = some_parameters();
  ShardedAdamW sharded(parameters, kOptions, group, {.bucket_bytes = 4096, .overlap = true, .overlap_gather = true});
  optim::AdamW adamw(expected, kOptions);
  const auto count_gradients = [&] {
    std::size_t count = 0;
    for (const Tensor& x : parameters) {
      count += x.grad().defined() ? 1 : 0;
    }
    return count;
  };
  const auto step_both = [&](int step) {
    set_means(expected, step, group.size());
    sharded.step({.max_grad_norm = 20});
    adamw.step({.max_grad_norm = 20});
    expect_same(parameters, expected, fmt::format("step {}", step));
    sharded.zero_grad();
  };
  run_backward(parameters, 0, group);
  EXPECT_EQ(count_gradients(), several ? 0 : parameters.size()) << "sent";
  step_both(0);

  // Accumulates gradients of half the size twice.
  for (int pass = 0; pass < 2; ++pass) {
    const auto guard = sharded.accumulate(pass == 0);
    Tensor loss;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const Tensor& x = parameters[i];
      const Tensor term = sum(x * (part_of(x, i, group.rank(), 1) * (0.5 * group.size())).to(x.dtype())).to(float64);
      loss = loss.defined() ? loss + term : term;
    }
    loss.backward();
    EXPECT_EQ(count_gradients(), several && pass == 1 ? 0 : parameters.size());
  }
  step_both(1);

  // If a parameter in the middle gets no gradient on one rank, the reductions of those before it wait.
  const std::size_t middle = 12;
  const int last = group.size() - 1;
  const auto has = [&](std::size_t i, int rank) { return i != middle || rank != last; };
  run_backward(parameters, 2, group, has);
  if (several && group.rank() == last) {
    EXPECT_GT(count_gradients(), middle - 1);
    EXPECT_LT(count_gradients(), parameters.size() - 1);
  } else {
    EXPECT_EQ(count_gradients(), several ? 0 : parameters.size() - 1);
  }
  set_means(expected, 2, group.size(), has);
  sharded.step({.max_grad_norm = 20});
  adamw.step({.max_grad_norm = 20});
  expect_same(parameters, expected, "step 2");

  // Gradients are dropped while ranks have started different numbers of reductions.
  sharded.zero_grad();
  run_backward(parameters, 7, group, has);
  sharded.zero_grad();
  run_backward(parameters, 3, group);
  step_both(3);

  // A step that fails keeps the gradients.
  if (several) {
    run_backward(parameters, 4, group);
    expect_error([&] { sharded.step({.max_grad_norm = group.rank() == last ? -1.0 : 20.0}); }, "ShardedAdamW: ");
    step_both(4);

    run_backward(parameters, 5, group);
    expect_error([&] { run_backward(parameters, 5, group); },
                 "a second time before step(): run all backward passes of a step but the last under accumulate()");
    step_both(5);
  }
  expect_same(sharded.state_dict(), adamw.state_dict());

  // Destroying the optimizer removes its hooks.
  {
    const Tensors others = some_parameters();
    { ShardedAdamW gone(others, kOptions, group, {.overlap = true}); }
    run_backward(others, 0, group);
    EXPECT_TRUE(others[0].grad().defined());
  }
}

// The reduction of the last layer's gradients starts before backward has reached the first layer.
TEST(ShardedAdamWOfRanks, SendsBeforeBackwardHasEnded) {
  const Group group = world();
  manual_seed(6);
  nn::Linear first(3, 4), second(4, 2);
  first.to(rank_device());
  second.to(rank_device());
  const Tensor last_weight = second.parameters()[0];
  bool complete = false, sent = false;
  last_weight.register_post_accumulate_grad_hook([&](const Tensor& leaf) { complete = leaf.grad().defined(); });
  Tensors parameters = first.parameters();
  for (const Tensor& x : second.parameters()) {
    parameters.push_back(x);
  }
  // The first layer's bias follows the last layer's weight in the list, so that backward completes buckets in another
  // order. The optimizer learns that order in the first step.
  ShardedAdamW optimizer(optim::AdamW::decay_matrices(parameters, kOptions), group,
                         {.bucket_bytes = 1, .overlap = true});
  for (int step = 0; step < 3; ++step) {
    complete = sent = false;
    const Tensor middle = first(here(ones({5, 3})));
    middle.register_hook([&](const Tensor&) {
      sent = complete && !last_weight.grad().defined();
      return Tensor{};
    });
    sum(second(middle)).backward();
    EXPECT_TRUE(complete);
    EXPECT_EQ(sent, group.size() > 1 && step > 0);
    optimizer.step();
    optimizer.zero_grad();
  }
  if (group.size() > 1) {
    expect_error([&] { ShardedAdamW(parameters, kOptions, group, {.overlap = true}); }, "EarlyAccumulation");
  }
}

TEST(ShardedAdamWOfRanks, SumsIn16BitsOrInFloat32) {
  const Group group = world();
  const int n = group.size();
  const auto gradient_of = [](int rank) {
    std::vector<float> data;
    for (int k = 0; k < 1000; ++k) {
      // Each number has 7 bits, but the sum of two ranks' numbers has more than the 8 bits of bfloat16.
      data.push_back(std::ldexp(static_cast<float>((k * 37 + rank * 101) % 255 - 127), 2 * rank - 8));
    }
    return from_data(data, {1000}, rank_device());
  };
  std::vector<float> mean(1000);
  for (int rank = 0; rank < n; ++rank) {
    const std::vector<float> part = to_vector<float>(gradient_of(rank));
    for (std::size_t k = 0; k < mean.size(); ++k) {
      mean[k] += part[k];  // exact in float32
    }
  }
  for (float& value : mean) {
    value /= static_cast<float>(n);
  }
  const auto weights_with = [&](const ShardingOptions& sharding) {
    const Tensor x = here(ones({1000}, bfloat16)).requires_grad_();
    ShardedAdamW optimizer({x}, {.lr = 0.1, .eps = 0.5}, group, sharding);
    x.set_grad(gradient_of(group.rank()).to(bfloat16));
    optimizer.step();
    return values(optimizer.state_dict().at("state.0.master"));
  };
  const Tensor y = here(ones({1000}, bfloat16)).requires_grad_();
  optim::AdamW adamw({y}, {.lr = 0.1, .eps = 0.5});
  y.set_grad(from_data(mean, {1000}, rank_device()).to(bfloat16));
  adamw.step();
  const std::vector<double> expected = values(adamw.state_dict().at("state.0.master"));
  EXPECT_EQ(weights_with({.reduce_dtype = float32}), expected);
  EXPECT_EQ(weights_with({.reduce_dtype = float64}), expected);
  if (n >= 3) {
    EXPECT_NE(weights_with({}), expected);  // here, sums are rounded more than once
  }
}

TEST(ShardedAdamWOfRanks, InfinityOnOneRankSkipsTheStepOnAll) {
  const Group group = world();
  const Tensors parameters = some_parameters(), expected = some_parameters();
  ShardedAdamW sharded(parameters, kOptions, group, kSharding);
  optim::AdamW adamw(expected, kOptions);
  optim::GradScaler scaler({.init_scale = 8, .growth_interval = 4}), other({.init_scale = 8, .growth_interval = 4});
  for (int step = 0; step < 12; ++step) {
    set_gradients(parameters, step, group);
    set_means(expected, step, group.size());
    const bool overflows = step % 4 == 1;
    if (overflows) {
      // One element is infinite, in another parameter and on another rank in each step.
      const std::size_t i = static_cast<std::size_t>(step) % parameters.size();
      const auto spoil = [&](const Tensor& x) {
        const Tensor grad = x.grad();
        if (grad.numel() > 0) {
          fill_data(as_strided(grad, {1}, {1}, grad.numel() - 1), std::numeric_limits<double>::infinity());
        }
      };
      if (group.rank() == step % group.size()) {
        spoil(parameters[i]);
      }
      spoil(expected[i]);
    }
    const double norm = sharded.step({.max_grad_norm = 20, .scaler = &scaler}).item();
    EXPECT_EQ(norm, adamw.step({.max_grad_norm = 20, .scaler = &other}).item());
    EXPECT_EQ(std::isfinite(norm), !overflows);
    scaler.update();
    other.update();
    EXPECT_EQ(scaler.scale(), other.scale());
    expect_same(parameters, expected, fmt::format("step {}", step));
  }
  expect_same(sharded.state_dict(), adamw.state_dict());
}

TEST(ShardedAdamWOfRanks, NamesTheRankWhoseGradientIsNotFinite) {
  const Group group = world();
  if (group.size() == 1) {
    return;
  }
  const int bad = group.size() - 1;
  for (const bool overlap : {false, true}) {
    const Tensors parameters = some_parameters();
    ShardedAdamW sharded(parameters, kOptions, group,
                         {.bucket_bytes = kSharding.bucket_bytes, .overlap = overlap, .check_gradients = true});
    run_backward(parameters, 0, group);
    sharded.step();
    sharded.zero_grad();
    std::vector<std::vector<double>> before;
    for (const Tensor& x : parameters) {
      before.push_back(values(x));
    }
    const autograd::HookHandle hook = parameters[1].register_hook([&](const Tensor& g) {
      return group.rank() == bad ? full_like(g, std::numeric_limits<double>::quiet_NaN()) : Tensor();
    });
    run_backward(parameters, 1, group);
    expect_error([&] { sharded.step(); },
                 group.rank() == bad
                     ? fmt::format("ShardedAdamW: on rank {}, the gradient of parameter 1 of shape {} has NaN", bad,
                                   parameters[1].shape())
                     : fmt::format("ShardedAdamW: step: rank {} has an error, which it reports", bad));
    sharded.zero_grad();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      EXPECT_EQ(values(parameters[i]), before[i]) << "nothing has changed";
    }
  }
}

TEST(ShardedAdamWOfRanks, CheckpointsOfAnyNumberOfRanks) {
  const Group group = world();
  const Tensors expected = some_parameters();
  optim::AdamW adamw(expected, kOptions);
  const auto train_expected = [&](int from, int to) {
    for (int step = from; step < to; ++step) {
      set_means(expected, step, 1, [](std::size_t i, int) { return i != 4; });
      adamw.step({.max_grad_norm = 30});
    }
  };
  // Each rank has the mean as its gradient, so that the mean is the same in a group of any size.
  const auto train = [](ShardedAdamW& optimizer, int from, int to) {
    for (int step = from; step < to; ++step) {
      set_means(optimizer.parameters(), step, 1, [](std::size_t i, int) { return i != 4; });
      optimizer.step({.max_grad_norm = 30});
    }
  };
  const Tensors parameters = some_parameters();
  ShardedAdamW all(parameters, kOptions, group, {.bucket_bytes = 4096, .overlap_gather = true});
  train(all, 0, 5);
  train_expected(0, 5);
  const StateDict state = all.state_dict();
  expect_same(state, adamw.state_dict());
  EXPECT_FALSE(state.contains("state.4.step"));

  // The states are gathered on one rank only.
  const int last = group.size() - 1;
  const StateDict at_last = all.state_dict(last);
  if (group.rank() == last) {
    expect_same(at_last, state);
  } else {
    EXPECT_TRUE(at_last.empty() || group.size() == 1);
  }

  // The ranks continue in groups of every size, with buckets of other sizes. The results must be those of optim::AdamW
  // and of the group of all ranks.
  train_expected(5, 9);
  for (int size = 1; size <= group.size(); ++size) {
    const Group part = group.split(group.rank() < size ? 0 : 1);
    const Tensors continued = copies_of(parameters);
    ShardedAdamW optimizer(continued, kOptions, part,
                           {.bucket_bytes = 1 + 5000 * size, .overlap_gather = size % 2 == 0});
    optimizer.load_state_dict(state);
    train(optimizer, 5, 9);
    expect_same(continued, expected, fmt::format("{} ranks", part.size()));
    expect_same(optimizer.state_dict(), adamw.state_dict());
  }
  const Tensors alone = copies_of(parameters);
  optim::AdamW one(alone, kOptions);
  one.load_state_dict(state);
  for (int step = 5; step < 9; ++step) {
    set_means(alone, step, 1, [](std::size_t i, int) { return i != 4; });
    one.step({.max_grad_norm = 30});
  }
  expect_same(alone, expected, "optim::AdamW");

  // Loads optim::AdamW's states into an optimizer that has stepped before. Missing states are reset.
  {
    const autograd::NoGrad guard;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      copy_into(parameters[i], expected[i]);
      parameters[i].bump_version();
    }
  }
  StateDict fewer = adamw.state_dict();
  for (const char* const what : {"step", "exp_avg", "exp_avg_sq"}) {
    fewer.erase(fmt::format("state.0.{}", what));
  }
  adamw.load_state_dict(fewer);
  all.load_state_dict(fewer);
  train(all, 9, 12);
  train_expected(9, 12);
  expect_same(parameters, expected, "after loading AdamW's states");
  expect_same(all.state_dict(), adamw.state_dict());
}

// If the program writes to parameters, master weights follow; otherwise they keep the digits that rounding hides.
TEST(ShardedAdamWOfRanks, FollowsWritesToParameters) {
  const Group group = world();
  const Tensors parameters = some_parameters(), expected = some_parameters();
  ShardedAdamW sharded(parameters, {.lr = 1e-4}, group, {.bucket_bytes = 4096, .overlap_gather = true});
  optim::AdamW adamw(expected, {.lr = 1e-4});
  for (int step = 0; step < 6; ++step) {
    set_gradients(parameters, step, group);
    set_means(expected, step, group.size());
    if (step == 3) {
      for (const Tensors& of : {parameters, expected}) {
        for (const Tensor& x : of) {
          if (x.dim() == 1 && x.numel() > 1) {
            fill_data(as_strided(x.detach(), {x.numel() - 1}, {1}, x.handle()->offset), 4);
            x.bump_version();
          }
        }
      }
    }
    sharded.step();
    adamw.step();
    expect_same(parameters, expected, fmt::format("step {}", step));
  }
  expect_same(sharded.state_dict(), adamw.state_dict());
}

TEST(ShardedAdamWOfRanks, KeepsItsShareOfTheStates) {
  const Group group = world();
  const int n = group.size();
  const Shape shapes[] = {{100, 70}, {70}, {5}, {40, 9}, {1}};
  for (const auto& [dtype, bytes] : {std::pair{float32, 8}, {bfloat16, 12}, {float64, 16}}) {
    Tensors parameters;
    std::int64_t elements = 0, padded = 0;
    const auto a = static_cast<std::int64_t>(256 / size_of(dtype));
    for (const Shape& shape : shapes) {
      parameters.push_back(here(ones(shape, dtype)).requires_grad_());
      elements += parameters.back().numel();
      padded += (parameters.back().numel() + a - 1) / a;
    }
    ShardedAdamW optimizer(parameters, kOptions, group);  // one bucket
    EXPECT_EQ(optimizer.state_bytes(), 0u);
    set_gradients(parameters, 0, group);
    optimizer.step();
    const std::int64_t part = (padded + n - 1) / n * a;
    const auto own = static_cast<std::int64_t>(optimizer.state_bytes());
    EXPECT_LE(own, part * bytes) << "as the header says";
    EXPECT_LE(part, elements / n + (static_cast<std::int64_t>(parameters.size()) / n + 1) * a);
    const Tensor total = from_data<std::int64_t>({own}, {1});
    group.all_reduce(total);
    EXPECT_EQ(to_vector<std::int64_t>(total)[0], elements * bytes) << "as AdamW, and not more";
    // The first ranks have complete parts, except for the gaps between parameters.
    if (group.rank() == 0 && n > 1) {
      EXPECT_EQ(own, part * bytes);
    }
  }
}

TEST(ShardedAdamWOfRanks, TrainsAModelAsAdamWDoesOnTheWholeBatch) {
  const Group group = world();
  manual_seed(5);
  const std::int64_t rows = 12;
  nn::Linear first(7, 9), second(9, 2);
  first.to(rank_device());
  second.to(rank_device());
  for (const nn::Module* const module : {static_cast<nn::Module*>(&first), static_cast<nn::Module*>(&second)}) {
    for (const Tensor& x : module->parameters()) {
      x.set_data(x.detach().to(float64));
    }
  }
  Tensors parameters = first.parameters();
  for (const Tensor& x : second.parameters()) {
    parameters.push_back(x);
  }
  const Tensor x = here(randn({rows, 7}, float64)), y = here(randn({rows, 2}, float64));
  // Computes the gradients of the mean over rows [from, to), in two passes.
  const auto backward = [&](std::int64_t from, std::int64_t to) {
    for (const auto& [begin, end] : {std::pair{from, (from + to) / 2}, {(from + to) / 2, to}}) {
      if (begin < end) {
        const Tensor error = second(tanh(first(slice(x, 0, begin, end)))) - slice(y, 0, begin, end);
        (sum(error * error) / static_cast<double>(to - from)).backward();
      }
    }
  };
  const Tensors start = copies_of(parameters);
  std::vector<std::vector<double>> expected;
  {
    optim::AdamW adamw(parameters, kOptions);
    for (int step = 0; step < 20; ++step) {
      adamw.zero_grad();
      backward(0, rows);
      adamw.step({.max_grad_norm = 0.5});
    }
    for (const Tensor& p : parameters) {
      expected.push_back(values(p));
    }
  }
  {
    const autograd::NoGrad guard;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      copy_into(parameters[i], start[i]);
      parameters[i].bump_version();
    }
  }
  backward(0, 1);
  ShardedAdamW sharded(parameters, kOptions, group, {.bucket_bytes = 300, .overlap_gather = true});
  EXPECT_TRUE(parameters[0].grad().defined()) << "the constructor keeps gradients";
  for (int step = 0; step < 20; ++step) {
    sharded.zero_grad();
    backward(group.rank() * rows / group.size(), (group.rank() + 1) * rows / group.size());
    sharded.step({.max_grad_norm = 0.5});
  }
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    testing_support::expect_close(parameters[i].detach(), expected[i], 1e-9, 1e-12);
  }
}

TEST(ShardedAdamWOfRanks, RanksMustAgree) {
  const Group group = world();
  const int last = group.size() - 1;
  if (last == 0) {
    return;
  }
  const bool odd_one = group.rank() == last;
  const auto blame = [&](const std::string& own) {
    return odd_one ? own : fmt::format("rank {} has an error, which it reports", last);
  };
  const auto two = [&](const Shape& second, DType dtype = float32) {
    return Tensors{here(ones({3})).requires_grad_(), here(ones(second, dtype)).requires_grad_()};
  };
  expect_error(
      [&] { ShardedAdamW(odd_one ? two({4}) : Tensors{here(ones({3})).requires_grad_()}, {}, group); },
      fmt::format("ShardedAdamW: the ranks disagree: rank {} has parameter 1 of float32 [4], rank 0 has nothing more",
                  last));
  expect_error([&] { ShardedAdamW(two({odd_one ? 4 : 5}), {}, group); },
               fmt::format("rank {} has parameter 1 of float32 [4], rank 0 has parameter 1 of float32 [5]", last));
  expect_error([&] { ShardedAdamW(two({4}, odd_one ? float64 : float32), {}, group); },
               fmt::format("rank {} has parameter 1 of float64 [4], rank 0 has parameter 1 of float32 [4]", last));
  expect_error(
      [&] { ShardedAdamW(two({4}), {.lr = odd_one ? 0.1 : 0.2}, group); },
      fmt::format("rank {} has group 0 of lr 0.1, betas 0.9 and 0.999, eps 1e-08, weight_decay 0.01, with master "
                  "weights, rank 0 has group 0 of lr 0.2, ",
                  last));
  expect_error([&] { ShardedAdamW(two({4}), {}, group, {.bucket_bytes = odd_one ? 100 : 200}); },
               fmt::format("rank {} has bucket_bytes 100, rank 0 has bucket_bytes 200", last));
  expect_error([&] { ShardedAdamW(two({4}), {}, group, {.overlap = odd_one}); },
               fmt::format("rank {} has overlap, rank 0 has no overlap", last));
  expect_error([&] { ShardedAdamW(two({4}), {}, group, {.overlap_gather = odd_one}); },
               fmt::format("rank {} has overlap_gather, rank 0 has no overlap_gather", last));
  expect_error([&] { ShardedAdamW(two({4}), {}, group, {.bucket_bytes = odd_one ? 0 : 200}); },
               blame("ShardedAdamW: expected bucket_bytes > 0, got 0"));
  expect_error([&] { ShardedAdamW(two({4}), {.lr = odd_one ? -1.0 : 1.0}, group); },
               blame("ShardedAdamW: expected lr >= 0, got -1"));
  const Tensor twice = here(ones({2})).requires_grad_();
  expect_error(
      [&] {
        ShardedAdamW({twice, odd_one ? twice : here(ones({2})).requires_grad_()}, {}, group);
      },
      blame("ShardedAdamW: a parameter of shape [2] was given twice"));
  EXPECT_EQ(twice.handle()->offset, 0);
  EXPECT_EQ(twice.handle()->storage->bytes(), 8u) << "nothing has changed";

  // None of the following changes weights or states.
  const Tensors parameters = some_parameters(), expected = some_parameters();
  ShardedAdamW sharded(parameters, kOptions, group, kSharding);
  optim::AdamW adamw(expected, kOptions);
  const auto good_step = [&](int step) {
    set_gradients(parameters, step, group);
    set_means(expected, step, group.size());
    sharded.step();
    adamw.step();
    expect_same(parameters, expected, fmt::format("step {}", step));
    expect_same(sharded.state_dict(), adamw.state_dict());
  };
  good_step(0);
  set_gradients(parameters, 1, group);
  expect_error([&] { sharded.step({.max_grad_norm = odd_one ? -1.0 : 1.0}); },
               blame("ShardedAdamW: expected max_grad_norm >= 0, got -1"));
  const std::string differ = fmt::format(
      "ShardedAdamW: rank {} calls step() with other learning rates, max_grad_norm, scaler or number of "
      "steps than rank 0",
      last);
  expect_error([&] { sharded.step({.max_grad_norm = odd_one ? 2.0 : 1.0}); }, differ);
  sharded.set_lr(odd_one ? 0.5 : 0.25);
  expect_error([&] { sharded.step(); }, differ);
  sharded.set_lr(kOptions.lr);
  optim::GradScaler scaler;
  expect_error([&] { sharded.step({.scaler = odd_one ? &scaler : nullptr}); }, differ);
  expect_error([&] { sharded.set_lr(7, 0.1); }, "ShardedAdamW: group 7 is out of range for 1 groups");
  good_step(1);

  const StateDict good = sharded.state_dict();
  StateDict bad = good;
  if (odd_one) {
    bad.at("state.5.exp_avg") = zeros({3});
  }
  expect_error([&] { sharded.load_state_dict(bad); },
               blame("ShardedAdamW: load_state_dict: expected \"state.5.exp_avg\" of shape [257], got [3]"));
  bad = good;
  if (odd_one) {
    bad.erase("state.5.exp_avg");
  }
  expect_error([&] { sharded.load_state_dict(bad); },
               blame("ShardedAdamW: load_state_dict: \"state.5.step\" and \"state.5.exp_avg\" must be given together"));
  bad = good;
  if (odd_one) {
    bad["state.99.exp_avg"] = zeros({3});
  }
  expect_error([&] { sharded.load_state_dict(bad); }, blame("ShardedAdamW: load_state_dict: \"state.99.exp_avg\" is"));
  bad = good;
  if (odd_one) {
    bad.at("state.5.step") = full({}, 17, int64);
  }
  expect_error([&] { sharded.load_state_dict(bad); },
               fmt::format("ShardedAdamW: load_state_dict: rank {} was given states of other steps than rank 0", last));
  expect_error([&] { sharded.state_dict(last + 1); },
               fmt::format("ShardedAdamW: state_dict: expected a rank in [0, {}), got {}", last + 1, last + 1));
  good_step(2);

  set_gradients(parameters, 3, group);
  optim::Ema ema(parameters);
  const auto swap = [&] {
    if (odd_one) {
      ema.swap();
    }
  };
  swap();
  expect_error([&] { sharded.step(); }, blame("ShardedAdamW: step was called while a parameter of shape"));
  swap();
  if (odd_one) {
    optim::clip_grad_norm_(parameters, 1);
  }
  expect_error([&] { sharded.step({.scaler = &scaler}); }, blame("ShardedAdamW: the gradient of a parameter of shape"));
  good_step(3);

  const Tensor inside = as_strided(parameters[5], {257}, {1}, parameters[5].handle()->offset);
  set_gradients(parameters, 4, group);
  if (odd_one) {
    parameters[5].set_data(here(ones({257})));
  }
  expect_error([&] { sharded.step(); },
               blame("ShardedAdamW: parameter 5 of shape [257] has left the memory that it got from the optimizer"));
  parameters[5].set_data(inside);
  good_step(4);
}

}  // namespace
}  // namespace mica::distributed
